//! Names and shapes of the published checkpoints' tensors.

use std::collections::BTreeMap;

const LISTS: [(&str, &str); 2] = [
    ("flux2-klein-4b", include_str!("flux2-klein-4b.txt")),
    ("flux2-klein-9b", include_str!("flux2-klein-9b.txt")),
];

/// Tensors of a recipe's published checkpoint that a picture needs, with their shapes.
pub fn published(recipe: &str) -> BTreeMap<String, Vec<usize>> {
    let (_, list) = LISTS.iter().find(|(name, _)| *name == recipe).unwrap();
    listed(list)
}

/// `name{0..3}.rest [1,2]` as three names with that shape.
fn listed(list: &str) -> BTreeMap<String, Vec<usize>> {
    let mut tensors = BTreeMap::new();
    for line in list.lines().filter(|line| !line.starts_with('#')) {
        let (name, shape) = line.split_once(' ').unwrap();
        let shape: Vec<usize> = serde_json::from_str(shape).unwrap();
        match name.split_once("{0..") {
            None => drop(tensors.insert(name.to_owned(), shape)),
            Some((start, rest)) => {
                let (count, end) = rest.split_once('}').unwrap();
                let names = (0..count.parse::<usize>().unwrap()).map(|layer| format!("{start}{layer}{end}"));
                tensors.extend(names.map(|name| (name, shape.clone())));
            }
        }
    }
    tensors
}
