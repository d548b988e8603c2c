//! From steps to a timeline: what is alive, and what the provider holds.

use std::collections::HashSet;

use super::{
    Moment,
    cache::Pool,
    program::{BufferId, Program, Step},
};
use crate::onnx::Graph;

/// Runs that are simulated. From the second on inputs are uploaded beside those of the run before, and the cache is warm.
const RUNS: usize = 2;

/// Every node that runs, with the bytes that are alive while it does and those that the provider holds then.
pub(super) fn timeline(graph: &Graph, program: &Program, mut pool: Pool) -> Vec<Moment> {
    let last = program.last_uses();
    let mut moments: Vec<Moment> = program
        .moments
        .iter()
        .map(|id| Moment {
            node: graph[*id].name.clone(),
            op_type: graph[*id].op_type.clone(),
            live: 0,
            held: 0,
        })
        .collect();
    for run in 0..RUNS {
        for buffer in &program.inputs {
            pool.take(program.buffers[*buffer]);
            if run > 0 {
                pool.give(program.buffers[*buffer]);
            }
        }
        pool.submit();
        let mut live = total(program, &program.inputs);
        for (index, step) in program.steps.iter().enumerate() {
            for buffer in &step.makes {
                pool.take(program.buffers[*buffer]);
            }
            live = live.saturating_add(total(program, &step.makes));
            pool.dispatch(step.dispatches);
            let moment = &mut moments[step.moment];
            moment.live = moment.live.max(live);
            moment.held = moment.held.max(pool.held());
            for buffer in ending(step, &last, index) {
                pool.give(program.buffers[buffer]);
                live = live.saturating_sub(program.buffers[buffer]);
            }
        }
        // Outputs are read back, which waits for everything.
        pool.submit();
        for buffer in made_outputs(program) {
            pool.give(program.buffers[buffer]);
        }
    }
    fill_views(&mut moments, program);
    moments
}

/// Buffers that nothing uses after this step.
fn ending(step: &Step, last: &[usize], index: usize) -> Vec<BufferId> {
    let mut ending: Vec<BufferId> = step.reads.iter().chain(&step.makes).copied().collect();
    ending.retain(|buffer| last[*buffer] == index);
    ending.sort_unstable();
    ending.dedup();
    ending
}

/// Outputs of the graph that are not its inputs, each once.
fn made_outputs(program: &Program) -> Vec<BufferId> {
    let mut outputs = program.outputs.clone();
    let inputs: HashSet<BufferId> = program.inputs.iter().copied().collect();
    outputs.retain(|buffer| !inputs.contains(buffer));
    outputs.sort_unstable();
    outputs.dedup();
    outputs
}

/// Nodes without a step of their own, views for example, change nothing.
fn fill_views(moments: &mut [Moment], program: &Program) {
    let mut has_step = vec![false; moments.len()];
    for step in &program.steps {
        has_step[step.moment] = true;
    }
    let (mut live, mut held) = (total(program, &program.inputs), total(program, &program.inputs));
    for (moment, has_step) in moments.iter_mut().zip(has_step) {
        if has_step {
            (live, held) = (moment.live, moment.held);
        } else {
            (moment.live, moment.held) = (live, held);
        }
    }
}

fn total(program: &Program, buffers: &[BufferId]) -> u64 {
    buffers.iter().map(|buffer| program.buffers[*buffer]).fold(0, u64::saturating_add)
}
