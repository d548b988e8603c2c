//! Sessions that stay loaded, one opening after the other.

mod support;

use std::collections::BTreeMap;

use support::Checkpoint;
use viaduct::{
    runtime::{Binding, Executor, KeptSessions, Provider, Runtime, RuntimeError, RuntimeOptions},
    tensor::HostTensor,
};
use viaduct_export::bundle::{Bundle, PortDim};

/// Runs the modulation stage for so many steps; its input is bound before the run, or given to it.
fn modulate(
    executor: &mut dyn Executor,
    bundle: &Bundle,
    steps: usize,
    is_bound: bool,
) -> Result<Vec<f32>, RuntimeError> {
    let stage = bundle.stage("modulation").unwrap();
    let channels = match &stage.inputs[0].dims[1] {
        PortDim::Fixed(channels) => *channels,
        other => panic!("{other:?}"),
    };
    let times = HostTensor::f32(&[steps, channels], vec![0.5; steps * channels]);
    let times = times.cast(&stage.inputs[0].dtype).unwrap_or(times);
    let sizes = BTreeMap::from([("steps".to_owned(), steps)]);
    let mut session = executor.open_stage(bundle, "modulation", &Binding::new(&sizes))?;
    let name = stage.inputs[0].name.as_str();
    let outputs = if is_bound {
        session.bind(name, &times)?;
        session.run(&[], &["mod_out"])?
    } else {
        session.run(&[(name, &times)], &["mod_out"])?
    };
    session.finish()?;
    Ok(outputs[0].to_f32())
}

#[test]
fn a_kept_session_is_as_good_as_a_new_one() {
    let exported = Checkpoint::klein_emoji().export("q8", &[]);
    let bundle = Bundle::open(&exported.path()).unwrap();
    let runtime =
        || Runtime::start(&RuntimeOptions { provider: Provider::Cpu, ..RuntimeOptions::default() }).unwrap();
    let (mut new, mut kept) = (runtime(), KeptSessions::new(runtime()));
    // The same, then another size and back; what was bound in one opening is not in the next.
    for (steps, is_bound) in [(4, true), (4, false), (4, true), (2, false), (4, false)] {
        let expected = modulate(&mut new, &bundle, steps, is_bound).unwrap();
        assert_eq!(modulate(&mut kept, &bundle, steps, is_bound).unwrap(), expected, "{steps} {is_bound}");
    }
    let sizes = BTreeMap::from([("steps".to_owned(), 4)]);
    let mut session = kept.open_stage(&bundle, "modulation", &Binding::new(&sizes)).unwrap();
    let error = session.run(&[], &["mod_out"]).unwrap_err();
    assert!(matches!(error, RuntimeError::InputMissing { .. }), "{error}");
    drop(session);
    modulate(&mut kept, &bundle, 4, false).unwrap();
    // Without its sessions the runtime opens one at a time.
    modulate(kept.runtime(), &bundle, 4, false).unwrap();
}
