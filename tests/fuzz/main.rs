//! Graphs that are made up and files that are broken, through reader, passes and writer.
//!
//! Every case has a seed; `VIADUCT_FUZZ_SEED=7` runs that one alone and prints more. `make fuzz` goes on for minutes. A case
//! that fails is made smaller, and its model is left in `target/fuzz-failures`.

mod draft;
mod graphs;
mod mutations;
mod operators;
mod patterns;
mod properties;
mod runtime_faults;
#[path = "../runtime_support/mod.rs"]
mod runtime_support;

use std::{
    collections::BTreeMap,
    env, fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use mutations::{Change, Corpus};
use properties::{Checker, Depth, Seen, Trial};
use proptest::{
    prelude::*,
    strategy::ValueTree,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};
use viaduct_export::onnx::{DType, Model, model_bytes};

/// How often a failing case is made smaller, at the most.
const MAX_SHRINKS: usize = 400;

/// Failures of other kinds are looked for, but not for ever.
const MAX_FAILURES: usize = 20;

/// One case, as it is generated and made smaller.
#[derive(Clone, Debug)]
enum Case {
    Graph(graphs::Recipe),
    File(mutations::Recipe),
}

impl Case {
    fn trial(&self, corpus: &Corpus) -> Trial {
        match self {
            Case::Graph(recipe) => recipe.trial(),
            Case::File(recipe) => recipe.trial(corpus),
        }
    }
}

fn graphs() -> BoxedStrategy<Case> {
    graphs::recipe().prop_map(Case::Graph).boxed()
}

/// Files changed in ways after which most still run.
fn altered_files() -> BoxedStrategy<Case> {
    mutations::recipe(Change::GENTLE).prop_map(Case::File).boxed()
}

/// Files changed in any way.
fn broken_files() -> BoxedStrategy<Case> {
    mutations::recipe(Change::ALL).prop_map(Case::File).boxed()
}

/// What is run: a strategy, how often in `make test`, and its part of a long run.
fn kinds() -> [(&'static str, BoxedStrategy<Case>, u64); 3] {
    [("graphs", graphs(), 60), ("altered", altered_files(), 60), ("broken", broken_files(), 200)]
}

fn tree(strategy: &BoxedStrategy<Case>, seed: u64) -> Box<dyn ValueTree<Value = Case>> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(Config { failure_persistence: None, ..Config::default() }, rng);
    strategy.new_tree(&mut runner).expect("strategies reject nothing")
}

/// Runs cases and keeps what fails.
struct Fuzzer {
    corpus: Corpus,
    checker: Checker,
    failures: BTreeMap<String, String>,
    seen: BTreeMap<(&'static str, Seen), u64>,
}

impl Fuzzer {
    fn new() -> Fuzzer {
        let folder = failures_folder();
        fs::create_dir_all(&folder).expect("a folder for failures");
        Fuzzer {
            corpus: Corpus::load(),
            checker: Checker::new(),
            failures: BTreeMap::new(),
            seen: BTreeMap::new(),
        }
    }

    fn run(&mut self, kind: &'static str, strategy: &BoxedStrategy<Case>, seed: u64) {
        let mut tree = tree(strategy, seed);
        let case = tree.current();
        // Should the process die, this tells of what.
        let _ = fs::write(failures_folder().join("running"), format!("{kind} seed {seed}\n{case:?}\n"));
        match self.try_case(&case) {
            Ok(seen) => *self.seen.entry((kind, seen)).or_default() += 1,
            Err(problem) => self.keep(kind, seed, &mut *tree, problem),
        }
    }

    fn try_case(&mut self, case: &Case) -> Result<Seen, String> {
        let attempt = catch_unwind(AssertUnwindSafe(|| self.checker.check(&case.trial(&self.corpus))));
        attempt.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Err(format!("panic: {}", text.unwrap_or_default()))
        })
    }

    /// Makes the case as small as it goes while it fails in the same way, and writes it down.
    fn keep(&mut self, kind: &str, seed: u64, tree: &mut dyn ValueTree<Value = Case>, problem: String) {
        let class = class(&problem);
        if self.failures.contains_key(&class) {
            return;
        }
        let mut smallest = (tree.current(), problem);
        let mut smaller = tree.simplify();
        for _ in 0..MAX_SHRINKS {
            if !smaller {
                break;
            }
            let case = tree.current();
            match self.try_case(&case) {
                Err(problem) if self::class(&problem) == class => {
                    smallest = (case, problem);
                    smaller = tree.simplify();
                }
                _ => smaller = tree.complicate(),
            }
        }
        let file = failures_folder().join(format!("{kind}-{seed}.onnx"));
        let (case, problem) = smallest;
        let _ = fs::write(&file, case.trial(&self.corpus).bytes);
        let report = format!("{kind}, seed {seed}: {problem}\n  {}\n", file.display());
        eprintln!("FAILED {report}");
        self.failures.insert(class, report);
    }

    fn finish(self) {
        let _ = ["running", "running.onnx"].map(|name| fs::remove_file(failures_folder().join(name)).ok());
        let cases: u64 = self.seen.values().sum();
        println!("{cases} cases passed:");
        for ((kind, seen), count) in &self.seen {
            println!("  {count:8} {kind}: {seen:?}");
        }
        for (name, count) in &self.checker.applied {
            println!("  {count:8} models rewritten by {name}");
        }
        let failures: Vec<String> = self.failures.into_values().collect();
        assert!(failures.is_empty(), "{} kinds of failures:\n{}", failures.len(), failures.join("\n"));
    }
}

/// The problem without what differs from case to case.
fn class(problem: &str) -> String {
    let line = problem.lines().next().unwrap_or_default();
    line.chars().filter(|c| !c.is_ascii_digit()).take(60).collect()
}

fn failures_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("target/fuzz-failures")
}

#[test]
fn some_seeds() {
    let mut fuzzer = Fuzzer::new();
    for (kind, strategy, count) in kinds() {
        (0..count).for_each(|seed| fuzzer.run(kind, &strategy, seed));
    }
    fuzzer.finish();
}

#[test]
#[ignore = "runs for minutes: make fuzz"]
fn many_seeds() {
    let number = |name: &str| env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let mut fuzzer = Fuzzer::new();
    if let Some(seed) = number("VIADUCT_FUZZ_SEED") {
        let kind = env::var("VIADUCT_FUZZ_KIND").unwrap_or_default();
        let chosen = kinds().into_iter().filter(|(name, _, _)| kind.is_empty() || *name == kind);
        chosen.for_each(|(kind, strategy, _)| fuzzer.run(kind, &strategy, seed));
        return fuzzer.finish();
    }
    let limit = Duration::from_secs(number("VIADUCT_FUZZ_SECONDS").unwrap_or(600));
    let start = Instant::now();
    // Behind the seeds that every test run tries, and elsewhere on every day.
    let day = std::time::UNIX_EPOCH.elapsed().map_or(0, |now| now.as_secs() / 86_400);
    let mut seed = number("VIADUCT_FUZZ_START").unwrap_or(1_000_000 * day);
    while start.elapsed() < limit && fuzzer.failures.len() < MAX_FAILURES {
        for (kind, strategy, part) in kinds() {
            (0..part).step_by(20).for_each(|i| fuzzer.run(kind, &strategy, seed + i));
        }
        seed += 200;
    }
    fuzzer.finish();
}

/// What most of the generated graphs should do: run. Otherwise nothing is tested.
#[test]
fn most_generated_graphs_run() {
    let corpus = Corpus::load();
    let mut checker = Checker::new();
    let strategy = graphs();
    let runs = |seed: &u64| {
        let trial = tree(&strategy, *seed).current().trial(&corpus);
        checker.runs(&trial).map_err(|problem| println!("{seed}: {problem}")).is_ok()
    };
    let ran = (0..100).filter(runs).count();
    assert!(ran >= 85, "{ran} of 100 graphs run");
    assert_eq!(tree(&strategy, 1).current().trial(&corpus).depth, Depth::Numbers);
}

fn same_numbers(model: &Model, pass: &str) {
    let bytes = model_bytes(model).unwrap();
    let trial = Trial { bytes, sizes: vec![BTreeMap::new()], depth: Depth::Numbers };
    let mut checker = Checker::new();
    assert_eq!(checker.check(&trial), Ok(Seen::Compared));
    assert!(checker.applied.contains_key(pass));
}

/// x / (1 + exp(-x)) at -8.5, whose fourth digit ONNX Runtime's Sigmoid does not have.
#[test]
fn digits_that_the_runtime_lacks_are_no_fault() {
    let mut net = runtime_support::Net::new(DType::F32);
    net.x("x", &[1]).float("one", &[], &[1.0]).float("far", &[], &[8.0]);
    net.node("Sub", &["x", "far"], "low", &[]).node("Neg", &["low"], "minus", &[]);
    net.node("Exp", &["minus"], "power", &[]).node("Add", &["power", "one"], "sum", &[]);
    net.node("Div", &["low", "sum"], "y", &[]);
    same_numbers(&net.model(&["y"]), "fuse_silu");
}

/// A norm of mean - x, which ONNX Runtime takes for one of x - mean.
#[test]
fn norms_that_the_runtime_turns_around_are_no_fault() {
    let mut net = runtime_support::Net::new(DType::F32);
    let axes = [("axes", runtime_support::ints(&[-1]))];
    net.x("x", &[2, 8]).float("two", &[], &[2.0]).float("eps", &[], &[1e-5]);
    net.float("scale", &[8], &[0.5; 8]).float("bias", &[8], &[0.1; 8]);
    net.node("ReduceMean", &["x"], "mean", &axes).node("Sub", &["mean", "x"], "turned", &[]);
    net.node("Pow", &["turned", "two"], "square", &[]).node("ReduceMean", &["square"], "variance", &axes);
    net.node("Add", &["variance", "eps"], "sum", &[]).node("Sqrt", &["sum"], "deviation", &[]);
    net.node("Div", &["turned", "deviation"], "normed", &[]);
    net.node("Mul", &["normed", "scale"], "scaled", &[]).node("Add", &["scaled", "bias"], "y", &[]);
    let mut model = net.model(&["y"]);
    model.opsets = vec![(String::new(), 17)];
    same_numbers(&model, "fuse_rms_norm");
}
