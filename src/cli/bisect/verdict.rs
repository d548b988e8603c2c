//! The verdict in words.

use crate::bisect::{Difference, Finding, Operand, Report, Reproduction};

/// The report as people read it.
pub fn table(report: &Report) -> String {
    let Report { a, b, values, compared, probes, other_shape, found, .. } = report;
    let mut lines = vec![format!("a: {a}"), format!("b: {b}")];
    if !other_shape.is_empty() {
        lines.push(format!("not compared, because their shapes differ: {}", other_shape.join(", ")));
    }
    match found {
        None => lines.push(format!("no difference above the tolerance over {compared} values")),
        Some(finding) => lines.extend(of_finding(finding)),
    }
    let runs = if *probes == 1 { "run" } else { "runs" };
    lines.push(format!("compared {compared} of {values} values in {probes} {runs} of each side\n"));
    lines.iter().map(|line| printable(line)).collect::<Vec<_>>().join("\n")
}

fn of_finding(finding: &Finding) -> Vec<String> {
    let Finding { node, difference, between, .. } = finding;
    let domain = if node.domain.is_empty() { String::new() } else { format!("{}.", node.domain) };
    let mut lines = vec![format!("{} {} ({domain}{})", finding.how(), node.name, node.op_type)];
    for (name, value) in &node.attributes {
        lines.push(format!("  attribute {name} = {value}"));
    }
    lines.extend(node.inputs.iter().map(|operand| line("takes", operand)));
    lines.extend(node.outputs.iter().map(|operand| line("gives", operand)));
    lines.push(format!("  at {}: {}", finding.value, numbers(difference)));
    if between.len() > 1 {
        let agreeing =
            if finding.agreeing.is_empty() { "the inputs".into() } else { finding.agreeing.join(", ") };
        lines.push(format!("  one of the {} nodes between {agreeing} and it:", between.len()));
        lines.extend(between.iter().map(|node| format!("    {node}")));
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
            contributions.iter().map(|made| format!("    {}: {}", made.node, made.difference.in_words())),
        );
    }
    lines.extend(finding.reproduction.iter().flat_map(of_reproduction));
    lines
}

fn of_reproduction(reproduction: &Reproduction) -> Vec<String> {
    let Reproduction { folder, command, shows, difference } = reproduction;
    let outcome =
        if *shows { "alone it differs, too" } else { "alone, on the other side's inputs, it agrees" };
    let outcome = format!("{outcome} ({})", difference.in_words());
    vec![format!("reproduction in {}: {outcome}", folder.display()), format!("  {command}")]
}

fn line(role: &str, operand: &Operand) -> String {
    let Operand { name, kind, dtype, shape, difference } = operand;
    let kind = if *kind == "value" { String::new() } else { format!(" ({kind})") };
    let compared =
        difference.as_ref().map_or_else(String::new, |difference| format!(": {}", numbers(difference)));
    format!("  {role} {name}{kind} {dtype} [{}]{compared}", shape.join(","))
}

fn numbers(difference: &Difference) -> String {
    let outcome = if difference.agrees() { "agrees" } else { "differs" };
    format!("{outcome}, {} (tolerance {:.0e})", difference.in_words(), difference.tolerance)
}

/// Names come from anyone's graphs.
fn printable(line: &str) -> String {
    line.replace(|c: char| c.is_control() && c != '\n', "\u{fffd}")
}
