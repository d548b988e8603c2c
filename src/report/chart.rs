//! The report as a drawing: bytes over the execution order, stage beside stage.

use viaduct_export::bytes::ByteSize;

use super::{Picture, Report, StageReport};
use crate::plot::{ADVANCE, Anchor, CAPITAL, Colour, Drawing, Shape};

/// More stages have no room.
pub const MAX_STAGES: usize = 64;

const PLOT_HEIGHT: f64 = 360.0;
/// Of the axis labels.
const LEFT: f64 = 130.0;
const TOP: f64 = 100.0;
const BOTTOM: f64 = 60.0;
const RIGHT: f64 = 20.0;
/// Pixels that all stages share by their number of nodes.
const SHARED: f64 = 700.0;
const GAP: f64 = 10.0;
const LONGEST_LABEL: usize = 24;
/// A budget that is further above the peak than this would flatten the drawing; it is told instead.
const BUDGET_IN_SIGHT: u64 = 3;

const INK: Colour = [40, 40, 40];
const GRID: Colour = [220, 220, 220];
const WEIGHTS: Colour = [122, 143, 166];
const ACTIVATIONS: Colour = [224, 139, 62];
const PROCESS: Colour = [236, 214, 190];
const BUDGET: Colour = [196, 30, 58];

/// Draws the report. For each stage, weights are the ground and live activations stand on it. Behind them stands all that
/// its process holds, which is what the budget bounds: free buffers and, where it counts, host memory besides.
pub fn chart(report: &Report) -> Drawing {
    let widths = widths(&report.stages);
    let right = LEFT + widths.iter().sum::<f64>() + GAP * report.stages.len() as f64;
    let top_bytes = top_bytes(report);
    let mut shapes = Vec::new();
    grid(&mut shapes, top_bytes, right);
    let mut left = LEFT + GAP;
    for (stage, width) in report.stages.iter().zip(widths) {
        draw_stage(&mut shapes, stage, [left, width], top_bytes, report.device.unified_memory);
        left += width + GAP;
    }
    head(&mut shapes, report, top_bytes, right);
    let (width, height) = ((right + RIGHT) as usize, (TOP + PLOT_HEIGHT + BOTTOM) as usize);
    Drawing { width, height, shapes }
}

/// Bytes of weights and live activations at each moment.
fn live(stage: &StageReport) -> Vec<u64> {
    let weights = stage.memory.weights_uploaded;
    stage.memory.timeline.iter().map(|moment| weights.saturating_add(moment.live)).collect()
}

/// Bytes that count against a budget at each moment; the largest is the stage's peak.
fn process(stage: &StageReport, unified: bool) -> Vec<u64> {
    let host = if unified { stage.memory.predicted.host } else { 0 };
    let ground = stage.memory.weights_uploaded.saturating_add(host);
    let moments: Vec<u64> =
        stage.memory.timeline.iter().map(|moment| ground.saturating_add(moment.held)).collect();
    if moments.is_empty() { vec![stage.peak_bytes] } else { moments }
}

/// Room for the nodes, and at least for the label.
fn widths(stages: &[StageReport]) -> Vec<f64> {
    let nodes: usize = stages.iter().map(|stage| stage.memory.timeline.len()).sum();
    let width = |stage: &StageReport| {
        let share = SHARED * stage.memory.timeline.len() as f64 / nodes.max(1) as f64;
        let letters = label(&stage.name).chars().count().max(10) + 1;
        share.max(letters as f64 * ADVANCE)
    };
    stages.iter().map(width).collect()
}

fn label(name: &str) -> String {
    match name.chars().count() {
        0..=LONGEST_LABEL => name.to_owned(),
        _ => name.chars().take(LONGEST_LABEL - 3).chain("...".chars()).collect(),
    }
}

/// The upper end of the axis.
fn top_bytes(report: &Report) -> u64 {
    let peak = report.stages.iter().map(|stage| stage.peak_bytes).max().unwrap_or(0).max(1);
    let budget = report.budget.filter(|budget| *budget <= peak.saturating_mul(BUDGET_IN_SIGHT));
    let top = peak.max(budget.unwrap_or(0));
    top.saturating_add(top / 12)
}

fn y_of(bytes: u64, top_bytes: u64) -> f64 {
    TOP + PLOT_HEIGHT * (1.0 - bytes as f64 / top_bytes as f64)
}

/// Level lines at a power of two of bytes and its multiples, at most eight.
fn grid(shapes: &mut Vec<Shape>, top_bytes: u64, right: f64) {
    let step = (top_bytes / 8).max(1).checked_next_power_of_two().unwrap_or(1 << 63);
    for tick in (0..).map_while(|i: u64| i.checked_mul(step)).take_while(|bytes| *bytes <= top_bytes) {
        let y = y_of(tick, top_bytes);
        shapes.push(Shape::Line { from: [LEFT, y], to: [right, y], dashed: false, colour: GRID });
        let text = ByteSize(tick).to_string();
        shapes.push(Shape::Text {
            at: [LEFT - 8.0, y + CAPITAL / 2.0],
            text,
            anchor: Anchor::End,
            colour: INK,
        });
    }
}

fn draw_stage(
    shapes: &mut Vec<Shape>,
    stage: &StageReport,
    [left, width]: [f64; 2],
    top_bytes: u64,
    unified: bool,
) {
    let (end, base) = (left + width, TOP + PLOT_HEIGHT);
    let mut draw = |heights: Vec<u64>, colour| {
        let steps = steps(&heights, [left, width], top_bytes);
        shapes.push(Shape::Steps { steps, end, base, colour });
    };
    draw(process(stage, unified), PROCESS);
    draw(live(stage), ACTIVATIONS);
    draw(vec![stage.memory.weights_uploaded], WEIGHTS);
    let middle = left + width / 2.0;
    let mut text = |y: f64, text: String| {
        shapes.push(Shape::Text { at: [middle, y], text, anchor: Anchor::Middle, colour: INK });
    };
    text(base + 24.0, label(&stage.name));
    text(y_of(stage.peak_bytes, top_bytes) - 6.0, ByteSize(stage.peak_bytes).to_string());
}

/// Heights side by side. Those that share a pixel are drawn as the largest of them.
fn steps(heights: &[u64], [left, width]: [f64; 2], top_bytes: u64) -> Vec<[f64; 2]> {
    let count = heights.len().max(1) as f64;
    let mut steps: Vec<[f64; 2]> = Vec::new();
    for (i, bytes) in heights.iter().enumerate() {
        let (x, y) = ((left + width * i as f64 / count).floor(), y_of(*bytes, top_bytes));
        match steps.last_mut() {
            Some(last) if last[0] == x => last[1] = last[1].min(y),
            _ => steps.push([x, y]),
        }
    }
    steps
}

/// Title, legend and budget.
fn head(shapes: &mut Vec<Shape>, report: &Report, top_bytes: u64, right: f64) {
    let mut x = LEFT;
    let mut word = |text: String, colour| {
        let next = x + (text.chars().count() + 2) as f64 * ADVANCE;
        shapes.push(Shape::Text { at: [x, 58.0], text, anchor: Anchor::Start, colour });
        x = next;
    };
    word("activations".to_owned(), ACTIVATIONS);
    word("weights".to_owned(), WEIGHTS);
    word("all of the process".to_owned(), PROCESS);
    if let Some(budget) = report.budget {
        let sight = if budget <= top_bytes { "" } else { " (above)" };
        word(format!("budget {}{sight}", ByteSize(budget)), BUDGET);
    }
    let room = ((right - LEFT) / ADVANCE) as usize;
    let title: String = title(report).chars().take(room).collect();
    shapes.push(Shape::Text { at: [LEFT, 30.0], text: title, anchor: Anchor::Start, colour: INK });
    if let Some(budget) = report.budget.filter(|budget| *budget <= top_bytes) {
        let y = y_of(budget, top_bytes);
        shapes.push(Shape::Line { from: [LEFT, y], to: [right, y], dashed: true, colour: BUDGET });
    }
    let base = TOP + PLOT_HEIGHT;
    shapes.push(Shape::Line { from: [LEFT, base], to: [right, base], dashed: false, colour: INK });
    shapes.push(Shape::Line { from: [LEFT, TOP], to: [LEFT, base], dashed: false, colour: INK });
}

/// `klein-4b q8, 1024x1024, on bc250`
fn title(report: &Report) -> String {
    let picture = report.picture.map(|Picture { width, height, .. }| format!(", {width}x{height}"));
    format!("{}{}, on {}", report.name, picture.unwrap_or_default(), report.device.name)
}

#[cfg(test)]
mod tests {
    use viaduct_export::{
        device::DeviceProfile,
        memory::{Moment, StageMemory},
        onnx::Model,
    };

    use super::*;
    use crate::{
        plan::{Budget, Plan, Settings},
        plot::{to_png, to_svg},
    };

    fn drawn(name: &str, device: &str, budget: Option<u64>, stages: Vec<StageReport>) -> Report {
        let device = DeviceProfile::preset(device).unwrap();
        let budgeted = Budget::asked(&device, budget);
        let plan = Plan::new(&[], &|_| Default::default(), &device, budgeted, 0);
        Report::new(name.to_owned(), None, device, budget, &plan, stages)
    }

    fn report(budget: Option<u64>) -> Report {
        let device = DeviceProfile::preset("bc250").unwrap();
        let stage = |name: &str, nodes: u64, weights: u64, live: u64| {
            let moment = |i: u64| {
                let live = live * (1 + i * 7 % 13) / 13;
                Moment { node: i.to_string(), op_type: String::new(), live, held: live }
            };
            let timeline = (0..nodes).map(moment).collect();
            let memory = StageMemory { weights_uploaded: weights, timeline, ..StageMemory::default() };
            let empty =
                StageReport::new(name, Model::default(), &Default::default(), &device, Settings::default());
            StageReport { memory, peak_bytes: weights + live, ..empty }
        };
        let stages = vec![
            stage("text_encoder", 900, 2 << 30, 300 << 20),
            stage("modulation", 20, 100 << 20, 1 << 20),
            stage("transformer", 1500, 4 << 30, 1 << 30),
            stage("a_stage_whose_name_is_far_too_long", 0, 0, 0),
            stage("vae_post1", 200, 50 << 20, 5 << 30),
        ];
        drawn("klein-4b q8", "bc250", budget, stages)
    }

    #[test]
    fn every_stage_has_its_name_and_peak() {
        let svg = to_svg(&chart(&report(Some(6 << 30))));
        for text in [
            "text_encoder",
            "a_stage_whose_name_is...",
            "2.3 GiB",
            "5 GiB",
            "budget 6 GiB",
            "dasharray",
            "klein-4b q8, on ",
        ] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
        assert!(to_png(&chart(&report(None))).is_ok());
    }

    #[test]
    fn a_far_budget_is_told_and_not_drawn() {
        let svg = to_svg(&chart(&report(Some(600 << 30))));
        assert!(svg.contains("budget 600 GiB (above)") && !svg.contains("dasharray"));
    }

    #[test]
    fn nothing_is_a_drawing_too() {
        assert!(to_png(&chart(&drawn("", "cpu", Some(0), Vec::new()))).is_ok());
    }
}
