//! Tensors that stay on the device between kept sessions.

mod support;

use std::{collections::BTreeMap, path::Path};

use support::{Checkpoint, scratch, webgpu::webgpu};
use viaduct::{
    pipeline::{
        event::Event,
        probe::{NoProbe, Probe},
        run::{Run, Watch},
        run_folder::{Earlier, Identity, NoiseIdentity, RunFolder},
        runs::Runs,
        text_to_image::{Noise, Request, TextToImage},
    },
    runtime::{
        Attended, Between, Binding, Device, DeviceTensor, Executor, Fence, KeptSessions, Placement, Provider,
        Runtime, RuntimeError, RuntimeOptions, Session, Tensor, TensorView,
    },
    tensor::HostTensor,
};
use viaduct_export::{
    arch::{SizesRequest, TextRows},
    bundle::{Bundle, Stages},
    shapes::Sizes,
};

/// Cuts the decoder into the first stage, two that hand over, and the last.
const CUTS: &str = "vae_decoder.cuts=1,2";
const HANDED_OVER: usize = 3;

/// Counts outputs that stay on the device.
struct Counted<'e> {
    executor: &'e mut dyn Executor,
    on_device: usize,
}

struct Counting<'r> {
    on_device: &'r mut usize,
}

impl Executor for Counted<'_> {
    fn device(&self) -> &Device {
        self.executor.device()
    }

    fn open_stage<'r>(
        &'r mut self,
        bundle: &Bundle,
        name: &str,
        binding: &Binding<'_>,
    ) -> Result<Box<dyn Session + 'r>, RuntimeError> {
        let session = self.executor.open_stage(bundle, name, binding)?;
        Ok(Box::new(Attended { session, between: Counting { on_device: &mut self.on_device } }))
    }
}

impl Between for Counting<'_> {
    fn run_placed(
        &mut self,
        session: &mut dyn Session,
        inputs: &[(&str, TensorView<'_>)],
        outputs: &[(&str, Placement)],
    ) -> Result<Vec<Tensor>, RuntimeError> {
        let tensors = session.run_placed(inputs, outputs)?;
        *self.on_device += tensors.iter().filter(|tensor| matches!(tensor, Tensor::Device(_))).count();
        Ok(tensors)
    }
}

/// Looks at boundaries, and keeps nothing of them.
struct Onlooker;

impl Probe for Onlooker {}

/// Draws a small picture; how many tensors stayed on the device on the way?
fn draw(
    bundle: &Bundle,
    executor: &mut dyn Executor,
    probe: &mut dyn Probe,
    folder: RunFolder,
    seed: u64,
) -> (HostTensor, usize) {
    let pipeline = TextToImage::open(bundle).unwrap();
    let size = pipeline.family().size(64, 64).unwrap();
    let (prompt, noise) = ("red apple".to_owned(), Noise::Seed(seed));
    let request = Request { prompt, negative: None, size, steps: 1, noise };
    let mut executor = Counted { executor, on_device: 0 };
    let mut listener = |_: Event| ();
    let watch = Watch::new(&mut listener, probe);
    let mut run = Run { executor: &mut executor, plan: None, watch, folder };
    let picture = pipeline.draw(&request, &mut run).unwrap();
    (picture, executor.on_device)
}

fn run_folder(root: &Path) -> RunFolder {
    let identity = Identity {
        viaduct: String::new(),
        bundle: String::new(),
        manifest: String::new(),
        prompt: String::new(),
        negative: None,
        width: 64,
        height: 64,
        steps: 1,
        noise: NoiseIdentity::Seed(1),
        device: BTreeMap::new(),
    };
    let runs = Runs { root: root.to_owned(), limit: 1 << 30 };
    RunFolder::open(&runs, &identity, None, Earlier::Continue, &mut |_: Event| ())
}

#[test]
fn webgpu_decoders_hand_over_on_the_device() {
    let Some(gpu) = webgpu() else { return };
    let exported = Checkpoint::klein_emoji().export("q8", &[CUTS]);
    let bundle = Bundle::open(&exported.path()).unwrap();
    let mut kept = KeptSessions::new(gpu.runtime);
    let (expected, seen) = draw(&bundle, &mut kept, &mut Onlooker, RunFolder::none(), 1);
    assert_eq!(seen, 0, "the probe misses tensors");
    for _ in 0..2 {
        let (picture, on_device) = draw(&bundle, &mut kept, &mut NoProbe, RunFolder::none(), 1);
        assert_eq!(on_device, HANDED_OVER);
        assert!(picture == expected, "another picture");
    }
    assert!(draw(&bundle, &mut kept, &mut NoProbe, RunFolder::none(), 2).0 != expected);
    let folder = scratch();
    let (picture, on_device) = draw(&bundle, &mut kept, &mut NoProbe, run_folder(folder.path()), 1);
    assert_eq!(on_device, 0, "the run folder misses tensors");
    assert!(picture == expected);
    let (picture, on_device) = draw(&bundle, kept.runtime(), &mut NoProbe, RunFolder::none(), 1);
    assert_eq!(on_device, 0, "a session outlives its turn");
    assert!(picture == expected);
}

#[test]
fn the_cpu_provider_leaves_nothing_on_a_device() {
    let exported = Checkpoint::klein_emoji().export("q8", &[CUTS]);
    let bundle = Bundle::open(&exported.path()).unwrap();
    let options = RuntimeOptions { provider: Provider::Cpu, ..RuntimeOptions::default() };
    let mut kept = KeptSessions::new(Runtime::start(&options).unwrap());
    let (picture, on_device) = draw(&bundle, &mut kept, &mut NoProbe, RunFolder::none(), 1);
    assert_eq!(on_device, 0);
    assert!(picture == draw(&bundle, &mut kept, &mut Onlooker, RunFolder::none(), 1).0);
}

fn sizes(bundle: &Bundle, side: usize) -> Sizes {
    bundle
        .sizes(&SizesRequest { width: side, height: side, steps: 1, halvings: 0, text: TextRows::all(512) })
        .unwrap()
}

/// Numbers as any, for an input of the first decoder stage.
fn latents(side: usize) -> HostTensor {
    let rows = side / 16;
    HostTensor::f32(&[1, 64, rows, rows], (0..64 * rows * rows).map(|i| (i % 7) as f32 - 3.0).collect())
}

/// The decoder's first stage: its state, left anywhere.
fn first_stage(kept: &mut KeptSessions, bundle: &Bundle, side: usize) -> Tensor {
    let sizes = sizes(bundle, side);
    let mut stage = kept.open_stage(bundle, "vae_pre", &Binding::new(&sizes)).unwrap();
    let latents = latents(side);
    let outputs = [("vae_mid_res0", Placement::Anywhere)];
    stage.run_placed(&[("latents", (&latents).into())], &outputs).unwrap().remove(0)
}

/// The decoder's second stage after the first one's state.
fn second_stage(
    kept: &mut KeptSessions,
    bundle: &Bundle,
    side: usize,
    state: TensorView<'_>,
    placement: Placement,
) -> Result<Tensor, RuntimeError> {
    let sizes = sizes(bundle, side);
    let mut stage = kept.open_stage(bundle, "vae_post0", &Binding::new(&sizes)).unwrap();
    run_second(&mut *stage, side, state, placement)
}

fn run_second(
    stage: &mut dyn Session,
    side: usize,
    state: TensorView<'_>,
    placement: Placement,
) -> Result<Tensor, RuntimeError> {
    let rows = side / 8;
    let attended = HostTensor::f32(&[1, rows, rows, 80], vec![0.25; 80 * rows * rows]);
    let output = stage.outputs().remove(0);
    let inputs = [("vae_mid_res0", state), ("attn", (&attended).into())];
    Ok(stage.run_placed(&inputs, &[(output.as_str(), placement)])?.remove(0))
}

fn on_device(tensor: Tensor) -> DeviceTensor {
    match tensor {
        Tensor::Device(tensor) => tensor,
        Tensor::Host(_) => panic!("the tensor lies on the host"),
    }
}

/// Whichever goes first, tensor or sessions.
#[test]
fn webgpu_tensors_on_the_device_outlive_their_sessions() {
    let Some(gpu) = webgpu() else { return };
    let exported = Checkpoint::klein_emoji().export("q8", &[]);
    let bundle = Bundle::open(&exported.path()).unwrap();
    let mut kept = KeptSessions::new(gpu.runtime);
    let state = on_device(first_stage(&mut kept, &bundle, 64));
    let expected = state.to_host().unwrap();
    assert_eq!((state.shape(), state.dtype()), (&expected.shape[..], expected.values.dtype()));
    assert!(expected.to_f32().iter().any(|value| *value != 0.0));

    // Another size takes the first stage's place, while the tensor is the second's input.
    let from_host = second_stage(&mut kept, &bundle, 64, (&expected).into(), Placement::Host)
        .unwrap()
        .into_host()
        .unwrap();
    on_device(first_stage(&mut kept, &bundle, 32));
    let (view, place) = (TensorView::Device(&state), Placement::Anywhere);
    let picture = on_device(second_stage(&mut kept, &bundle, 64, view, place).unwrap());
    assert!(picture.to_host().unwrap() == from_host, "another picture");

    // The tensor's last holder is a session that it is bound to, until another takes its place there.
    let bound = on_device(first_stage(&mut kept, &bundle, 64));
    on_device(first_stage(&mut kept, &bundle, 32));
    let sizes = sizes(&bundle, 64);
    let mut stage = kept.open_stage(&bundle, "vae_post0", &Binding::new(&sizes)).unwrap();
    for state in [Tensor::Device(bound), Tensor::Host(expected.clone())] {
        let again = run_second(&mut *stage, 64, state.view(), Placement::Host).unwrap();
        assert!(again.into_host().unwrap() == from_host);
    }
    drop(stage);

    // All sessions go, then the tensors.
    kept.runtime();
    assert!(state.to_host().unwrap() == expected);
    let again = state.clone();
    drop(state);
    assert!(again.to_host().unwrap() == expected && picture.to_host().unwrap() == from_host);
    drop((again, picture));

    // Tensors first, then the sessions; and the device still works.
    let state = on_device(first_stage(&mut kept, &bundle, 64));
    assert!(state.to_host().unwrap() == expected);
    drop(state);
    drop(kept);
}

#[test]
fn webgpu_tensors_on_the_device_are_checked() {
    let Some(gpu) = webgpu() else { return };
    let exported = ["f32", "q8"].map(|profile| Checkpoint::klein_emoji().export(profile, &[]));
    let [f32, q8] = exported.each_ref().map(|bundle| Bundle::open(&bundle.path()).unwrap());
    let mut kept = KeptSessions::new(gpu.runtime);
    let state = on_device(first_stage(&mut kept, &f32, 64));
    let mut run = |bundle: &Bundle, side, state: &DeviceTensor| {
        second_stage(&mut kept, bundle, side, state.into(), Placement::Host).map(drop)
    };
    run(&f32, 64, &state).unwrap();
    // A symbol of two sizes, and an element type.
    for (bundle, side, message) in [
        (&f32, 128, "tensor attn: expected mid_height = 8 on axis 1 as in vae_mid_res0, got [1, 16, 16, 80]"),
        (&q8, 64, "tensor vae_mid_res0: expected F16, got F32"),
    ] {
        let error = run(bundle, side, &state).unwrap_err();
        assert_eq!(error.to_string(), format!("stage vae_post0: {message}"));
    }
    run(&f32, 64, &state).unwrap();
}

/// Resident bytes of this process, which hold those of a software adapter.
fn resident() -> i64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<i64>().unwrap() * 4096
}

/// A step's output is the next one's input, as that of a cache is.
#[test]
fn webgpu_memory_does_not_grow_with_what_is_handed_over() {
    const ROWS: usize = 256;
    let Some(gpu) = webgpu() else { return };
    let is_software = gpu.runtime.device().kind == viaduct::runtime::DeviceKind::Software;
    let exported = Checkpoint::klein_emoji().export("q8", &[]);
    let bundle = Bundle::open(&exported.path()).unwrap();
    let mut kept = KeptSessions::new(gpu.runtime);
    let sizes = BTreeMap::from([("steps".to_owned(), ROWS)]);
    let mut stage = kept.open_stage(&bundle, "modulation", &Binding::new(&sizes)).unwrap();
    let mut fence = Fence::new().unwrap();
    let outputs = ["dit_temb", "mod_img"].map(|name| (name, Placement::Anywhere));
    let mut step = |x: &Tensor| {
        let tensors = stage.run_placed(&[("time_embedding", x.view())], &outputs).unwrap();
        // Nothing else waits for the device.
        fence.wait().unwrap();
        tensors
    };
    let bytes = 20 * ROWS as i64 * (1 + 6) * 256 * 4;
    let mut x = Tensor::Host(HostTensor::f32(&[ROWS, 256], vec![0.5; ROWS * 256]));
    (0..5).for_each(|_| x = step(&x).remove(0));
    let before = resident();
    (0..20).for_each(|_| x = step(&x).remove(0));
    let let_go = resident() - before;
    let mut held = vec![vec![x]];
    (0..20).for_each(|_| held.push(step(&held[held.len() - 1][0])));
    let held_on = resident() - before - let_go;
    println!("{let_go} bytes more, and {held_on} where all are held");
    assert!(let_go < bytes / 2, "{let_go}");
    assert!(!is_software || held_on > bytes / 2, "{held_on}");
}
