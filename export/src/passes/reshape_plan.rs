//! How a reshape is written without reading any size at run time.
//!
//! A target of Reshape may copy a size of its input at the same place (0), and take what is left once (-1). Sizes that
//! change their place get there by Unsqueeze and Squeeze, and every further product of open sizes takes a Reshape of its
//! own: [1, 32, h, w] -> [1, 8, 2, 2, h, w] is Unsqueeze(2, 3), Reshape(1, 8, 2, 2, 0, 0).

use std::ops::Range;

/// Sizes along one axis: one for every way in which the open dimensions are bound.
pub type Sizes = Vec<usize>;

/// One Reshape after the other, with new axes before and surplus ones taken out after.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub unsqueeze: Vec<i64>,
    pub targets: Vec<Vec<i64>>,
    pub squeeze: Vec<i64>,
}

/// The plan for a reshape between these sizes; `Err` has the places of the new sizes that cannot be had without reading
/// others.
pub fn plan(from: &[Sizes], to: &[Sizes]) -> Result<Plan, Vec<usize>> {
    match single(from, to) {
        Some(target) => Ok(Plan { targets: vec![target], ..Plan::default() }),
        None => grouped(from, to),
    }
}

/// Where the axis of the new shape is in the old one, if it holds the same elements.
pub fn kept_axis(from: &[Sizes], to: &[Sizes], axis: usize) -> Option<usize> {
    let group = groups(from, to)?.into_iter().find(|group| group.to.contains(&axis))?;
    (group.from.len() == 1 && group.to.len() == 1).then_some(group.from.start)
}

/// The size if it is always the same and not zero, which a target cannot say.
fn fixed(sizes: &Sizes) -> Option<i64> {
    let first = sizes.first()?;
    let same = *first > 0 && sizes.iter().all(|size| size == first);
    same.then(|| i64::try_from(*first).ok()).flatten()
}

fn single(from: &[Sizes], to: &[Sizes]) -> Option<Vec<i64>> {
    let size = |(at, size): (usize, &Sizes)| match fixed(size) {
        Some(number) => number,
        None if from.get(at) == Some(size) => 0,
        None => -1,
    };
    let target: Vec<i64> = to.iter().enumerate().map(size).collect();
    (target.iter().filter(|size| **size == -1).count() <= 1).then_some(target)
}

/// Axes that hold the same elements before and after, as few as possible.
struct Group {
    from: Range<usize>,
    to: Range<usize>,
    /// Some sizes are open, and not just one that stays.
    mixed: bool,
}

impl Group {
    fn width(&self) -> usize {
        self.from.len().max(self.to.len())
    }
}

fn grouped(from: &[Sizes], to: &[Sizes]) -> Result<Plan, Vec<usize>> {
    let open = |places: Range<usize>| places.filter(|at| fixed(&to[*at]).is_none()).collect::<Vec<_>>();
    let groups = groups(from, to).ok_or_else(|| open(0..to.len()))?;
    if let Some(group) = groups.iter().find(|group| group.mixed && open(group.to.clone()).len() > 1) {
        return Err(open(group.to.clone()));
    }
    let mut plan = Plan::default();
    let mut place = 0;
    for group in &groups {
        let end = place + group.width();
        plan.unsqueeze.extend((place + group.from.len()..end).map(|at| at as i64));
        plan.squeeze.extend((place + group.to.len()..end).map(|at| at as i64));
        place = end;
    }
    let mixed = groups.iter().filter(|group| group.mixed).count();
    let steps = (0..mixed.max(1)).map(|step| target(&groups, from, to, step));
    plan.targets = steps.collect();
    let moved =
        groups.iter().all(|group| from[group.from.clone()] == to[group.to.clone()] || group.width() == 1);
    if mixed == 0 && moved {
        plan.targets.clear();
    }
    Ok(plan)
}

/// What the step asks for that rewrites the mixed group of that number; those before it are done.
fn target(groups: &[Group], from: &[Sizes], to: &[Sizes], step: usize) -> Vec<i64> {
    let mut target = Vec::new();
    let mut number = 0;
    for group in groups {
        let done = !group.mixed || number <= step;
        let now = group.mixed && number == step;
        let sizes = if done { &to[group.to.clone()] } else { &from[group.from.clone()] };
        let open = if now { -1 } else { 0 };
        target.extend(sizes.iter().map(|sizes| fixed(sizes).unwrap_or(open)));
        target.extend(std::iter::repeat_n(1, group.width() - sizes.len()));
        number += usize::from(group.mixed);
    }
    target
}

fn groups(from: &[Sizes], to: &[Sizes]) -> Option<Vec<Group>> {
    let one = |sizes: Option<&Sizes>| sizes.is_none_or(|sizes| fixed(sizes) == Some(1));
    let mut groups = Vec::new();
    let (mut i, mut j) = (0, 0);
    while i < from.len() || j < to.len() {
        let start = (i, j);
        match (one(from.get(i)), one(to.get(j))) {
            (true, false) if i < from.len() => i += 1,
            (false, true) if j < to.len() => j += 1,
            (true, true) => (i, j) = ((i + 1).min(from.len()), (j + 1).min(to.len())),
            _ => (i, j) = group_end(from, to, i, j)?,
        }
        let (from_part, to_part) = (&from[start.0..i], &to[start.1..j]);
        let all_fixed = from_part.iter().chain(to_part).all(|sizes| fixed(sizes).is_some());
        let kept = from_part.len() == 1 && from_part == to_part;
        groups.push(Group { from: start.0..i, to: start.1..j, mixed: !all_fixed && !kept });
    }
    Some(groups)
}

/// Where the products of sizes from here on are equal for the first time.
fn group_end(from: &[Sizes], to: &[Sizes], mut i: usize, mut j: usize) -> Option<(usize, usize)> {
    let (mut a, mut b) = (from.get(i)?.clone(), to.get(j)?.clone());
    (i, j) = (i + 1, j + 1);
    while let Some((x, y)) = a.iter().zip(&b).find(|(x, y)| x != y) {
        let (product, sizes, at) = if x < y { (&mut a, from, &mut i) } else { (&mut b, to, &mut j) };
        let next = sizes.get(*at)?;
        let grown = product.iter().zip(next).map(|(product, size)| product.checked_mul(*size));
        *product = grown.collect::<Option<_>>()?;
        *at += 1;
    }
    Some((i, j))
}
