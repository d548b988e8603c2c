use viaduct_export::{
    onnx::{DType, Dim},
    passes::{Settings, pass},
};

use crate::{
    runtime_support::{Feeds, Net, int, noise, tensor},
    same::{Bar, one, rewrite},
};

const ROWS: usize = 6;
const WIDTH: usize = 16;

/// Angles of each row, each column twice: in pairs, or the whole row.
fn table(interleaved: bool, of: fn(f32) -> f32) -> Vec<f32> {
    let angle = |row: usize, pair: usize| of(row as f32 * 0.3 + pair as f32 * 0.7);
    let pair = |column: usize| if interleaved { column / 2 } else { column % (WIDTH / 2) };
    (0..ROWS * WIDTH).map(|i| angle(i / WIDTH, pair(i % WIDTH))).collect()
}

fn tables(net: &mut Net, shape: &[usize], interleaved: bool) {
    net.float("cos", shape, &table(interleaved, f32::cos)).float("sin", shape, &table(interleaved, f32::sin));
}

/// x * cos + turned * sin.
fn sum(net: &mut Net) {
    net.node("Mul", &["x", "cos"], "straight", &[]).node("Mul", &["turned", "sin"], "crossed", &[]).node(
        "Add",
        &["straight", "crossed"],
        "y",
        &[],
    );
}

fn turn_halves(net: &mut Net) {
    net.ints("axis", &[-1]).ints("zero", &[0]).ints("half", &[WIDTH as i64 / 2]).ints("end", &[i64::MAX]);
    net.node("Slice", &["x", "zero", "half", "axis"], "first", &[])
        .node("Slice", &["x", "half", "end", "axis"], "second", &[])
        .node("Neg", &["second"], "minus", &[])
        .node("Concat", &["minus", "first"], "turned", &[("axis", int(-1))]);
}

fn turn_neighbours(net: &mut Net) {
    net.ints("axis", &[-1]).ints("zero", &[0]).ints("one", &[1]).ints("two", &[2]);
    net.ints("pairs", &[0, 0, 0, WIDTH as i64 / 2, 2]).ints("whole", &[0, 0, 0, WIDTH as i64]);
    net.node("Reshape", &["x", "pairs"], "paired", &[])
        .node("Slice", &["paired", "zero", "one", "axis"], "even1", &[])
        .node("Squeeze", &["even1", "axis"], "even", &[])
        .node("Slice", &["paired", "one", "two", "axis"], "odd1", &[])
        .node("Squeeze", &["odd1", "axis"], "odd", &[])
        .node("Neg", &["odd"], "minus", &[])
        .node("Unsqueeze", &["minus", "axis"], "minus1", &[])
        .node("Unsqueeze", &["even", "axis"], "even2", &[])
        .node("Concat", &["minus1", "even2"], "stack", &[("axis", int(-1))])
        .node("Reshape", &["stack", "whole"], "turned", &[]);
}

fn feeds(shape: &[usize]) -> Feeds {
    vec![("x".to_owned(), tensor(DType::F32, shape, &noise(1, shape.iter().product())))]
}

#[test]
fn halves_of_heads_before_rows() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[2, 3, ROWS, WIDTH]);
    tables(&mut net, &[1, 1, ROWS, WIDTH], false);
    turn_halves(&mut net);
    sum(&mut net);
    let after = one(&net.model(&["y"]), "fuse_rope", &feeds(&[2, 3, ROWS, WIDTH]), Bar::Relative(1e-6));
    let operators: Vec<_> = after.operators().into_iter().collect();
    assert_eq!(operators, [("RotaryEmbedding", 1)]);
}

#[test]
fn neighbours_of_heads_after_rows() {
    let mut net = Net::new(DType::F32);
    net.x("x", &[1, ROWS, 3, WIDTH]).ints("around", &[0, 2]);
    tables(&mut net, &[1, ROWS, 1, WIDTH], true);
    turn_neighbours(&mut net);
    sum(&mut net);
    let after = one(&net.model(&["y"]), "fuse_rope", &feeds(&[1, ROWS, 3, WIDTH]), Bar::Relative(1e-6));
    assert_eq!(after.applied(), 1);
    assert_eq!(after.operators().get("RotaryEmbedding"), Some(&1));
    assert_eq!(after.operators().get("Neg"), None);
}

/// As exporters make them: cosines of ids times frequencies, each repeated, for two axes.
#[test]
fn tables_that_nodes_repeat_lose_the_repetition() {
    let mut net = Net::new(DType::F32);
    let rows = Dim::Symbol("rows".to_owned());
    net.input("x", DType::F32, &[Dim::Fixed(1), rows.clone(), Dim::Fixed(3), Dim::Fixed(WIDTH)])
        .input("ids", DType::F32, &[rows, Dim::Fixed(1)])
        .float("a.frequencies", &[WIDTH / 4], &noise(2, WIDTH / 4))
        .float("b.frequencies", &[WIDTH / 4], &noise(3, WIDTH / 4))
        .ints("last", &[2])
        .ints("twice", &[1, 1, 2])
        .ints("flat", &[-1, WIDTH as i64 / 2])
        .ints("around", &[0, 2]);
    for axis in ["a", "b"] {
        let name = |part: &str| format!("{axis}.{part}");
        net.node("Mul", &["ids", &name("frequencies")], &name("angles"), &[]);
        for (op, table) in [("Cos", "cos"), ("Sin", "sin")] {
            let part = |part: &str| format!("{axis}.{table}.{part}");
            net.node(op, &[&name("angles")], &part("of"), &[])
                .node("Unsqueeze", &[&part("of"), "last"], &part("column"), &[])
                .node("Tile", &[&part("column"), "twice"], &part("pairs"), &[])
                .node("Reshape", &[&part("pairs"), "flat"], &part("table"), &[]);
        }
    }
    for table in ["cos", "sin"] {
        let [a, b] = ["a", "b"].map(|axis| format!("{axis}.{table}.table"));
        let joined = format!("{table}.joined");
        net.node("Concat", &[&a, &b], &joined, &[("axis", int(-1))]);
        net.node("Unsqueeze", &[&joined, "around"], table, &[]);
    }
    turn_neighbours(&mut net);
    sum(&mut net);
    let mut feeds = feeds(&[1, ROWS, 3, WIDTH]);
    feeds.push(("ids".to_owned(), tensor(DType::F32, &[ROWS, 1], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0])));
    let after = one(&net.model(&["y"]), "fuse_rope", &feeds, Bar::Relative(1e-6));
    assert_eq!(after.applied(), 1);
    let operators = after.operators();
    assert_eq!((operators.get("Tile"), operators.get("Concat")), (None, Some(&2)));
}

#[test]
fn unequal_columns_tables_per_item_and_other_ranks_are_refused() {
    let refusal = |shape: &[usize], table: &[usize], values: &[f32]| {
        let mut net = Net::new(DType::F32);
        net.x("x", shape).float("cos", table, values).float("sin", table, values);
        turn_halves(&mut net);
        sum(&mut net);
        let after = rewrite(&net.model(&["y"]), &[pass("fuse_rope").unwrap()], &Settings::default());
        assert_eq!(after.applied(), 0);
        after.refusals().into_keys().collect::<Vec<_>>()
    };
    let any = noise(5, 2 * ROWS * WIDTH);
    assert_eq!(
        refusal(&[1, 3, ROWS, WIDTH], &[1, 1, ROWS, WIDTH], &any[..ROWS * WIDTH]),
        ["the columns of a table are not provably equal in pairs"]
    );
    assert_eq!(
        refusal(&[2, 3, ROWS, WIDTH], &[2, 1, ROWS, WIDTH], &any),
        ["the tables are not one row of angles per row of the value"]
    );
    assert_eq!(
        refusal(&[3, ROWS, WIDTH], &[1, ROWS, WIDTH], &any[..ROWS * WIDTH]),
        ["the value is not four-dimensional"]
    );
}
