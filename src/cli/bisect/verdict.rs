//! The verdict in words.

use crate::{
    bisect::{Difference, Finding, Operand, Report, Reproduction},
    printable::one_line,
};

/// The report as people read it.
pub fn table(report: &Report) -> String {
    let Report { a, b, values, compared, probes, other_shape, nothing_in, found, .. } = report;
    let mut lines = vec![format!("a: {a}"), format!("b: {b}")];
    if !other_shape.is_empty() {
        lines.push(format!("not compared, because their shapes differ: {}", names(other_shape)));
    }
    match found {
        None if nothing_in.is_empty() => {
            lines.push(format!("no difference above the tolerance over {compared} values"));
        }
        None => lines.push(format!(
            "no difference above the tolerance over {compared} values, of which {} are empty or nothing but NaN",
            nothing_in.len()
        )),
        Some(finding) => lines.extend(of_finding(finding)),
    }
    let runs = if *probes == 1 { "run" } else { "runs" };
    lines.push(format!("compared {compared} of {values} values in {probes} {runs} of each side"));
    lines.iter().map(|line| format!("{}\n", one_line(line))).collect()
}

fn of_finding(finding: &Finding) -> Vec<String> {
    let Finding { node, difference, between, .. } = finding;
    let domain = if node.domain.is_empty() { String::new() } else { format!("{}.", node.domain) };
    let mut lines =
        vec![format!("{} {} ({domain}{})", finding.how(), short(&node.name), short(&node.op_type))];
    for (name, value) in &node.attributes {
        lines.push(format!("  attribute {name} = {value}"));
    }
    lines.extend(node.inputs.iter().map(|operand| line("takes", operand)));
    lines.extend(node.outputs.iter().map(|operand| line("gives", operand)));
    lines.push(format!("  at {}: {}", short(&finding.value), numbers(difference)));
    if between.len() > 1 {
        let agreeing =
            if finding.agreeing.is_empty() { "the inputs".into() } else { names(&finding.agreeing) };
        lines.push(format!("  one of the {} nodes between {agreeing} and it:", between.len()));
        lines.extend(between.iter().map(|node| format!("    {}", short(node))));
    }
    if !finding.confirmed {
        lines.push("  looked at alone it agrees: what the provider computes depends on what is shown".into());
    }
    if finding.unseen_before > 0 {
        let unseen = finding.unseen_before;
        lines.push(format!("  {unseen} values before it were not compared; --exhaustive compares them, too"));
    }
    if let Some(contributions) = &finding.adds_up {
        lines.push(
            "  no node up to it differs by itself: small differences add up, most of them made by".into(),
        );
        lines.extend(
            contributions
                .iter()
                .map(|made| format!("    {}: {}", short(&made.node), made.difference.in_words())),
        );
    }
    lines.extend(finding.reproduction.iter().flat_map(of_reproduction));
    lines
}

fn of_reproduction(reproduction: &Reproduction) -> Vec<String> {
    let Reproduction { folder, command, shows, difference, unwritten } = reproduction;
    let outcome =
        if *shows { "alone it differs, too" } else { "alone, on the other side's inputs, it agrees" };
    let outcome = format!("{outcome} ({})", difference.in_words());
    if let Some(problem) = unwritten {
        return vec![format!("no reproduction ({problem}): {outcome}")];
    }
    vec![format!("reproduction in {}: {outcome}", folder.display()), format!("  {command}")]
}

fn line(role: &str, operand: &Operand) -> String {
    let Operand { name, kind, dtype, shape, difference } = operand;
    let kind = if *kind == "value" { String::new() } else { format!(" ({kind})") };
    let compared =
        difference.as_ref().map_or_else(String::new, |difference| format!(": {}", numbers(difference)));
    format!("  {role} {}{kind} {dtype} [{}]{compared}", short(name), shape.join(","))
}

fn numbers(difference: &Difference) -> String {
    let outcome = if difference.agrees() { "agrees" } else { "differs" };
    format!("{outcome}, {} (tolerance {:.0e})", difference.in_words(), difference.tolerance)
}

/// A name that takes no more than a part of a line: its beginning and its end.
fn short(name: &str) -> String {
    const LONGEST: usize = 96;
    let name: Vec<char> = one_line(name).chars().collect();
    if name.len() <= LONGEST {
        return name.into_iter().collect();
    }
    let (head, tail) = (&name[..LONGEST / 2], &name[name.len() - LONGEST / 2..]);
    head.iter().chain(&['.'; 3]).chain(tail).collect()
}

fn names(names: &[String]) -> String {
    names.iter().map(|name| short(name)).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_in_their_line() {
        assert_eq!(short("a\nb\u{1b}[31m\u{202e}"), r"a\nb\u{1b}[31m\u{202e}");
        let long = short(&format!("first{}last", "x".repeat(4000)));
        assert!(long.len() < 100 && long.starts_with("first") && long.ends_with("last"), "{long}");
    }
}
