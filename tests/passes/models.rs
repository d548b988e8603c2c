//! Whole models as torch exports them: a long acceptance run over files that are not in the repository.

use std::{collections::BTreeMap, path::PathBuf};

use viaduct::{
    runtime::{RuntimeError, lower},
    tensor::{HostTensor, Values},
};
use viaduct_export::{
    device::DeviceProfile,
    onnx::{DType, Dim, Model, ValueId, ValueType, read_graph, read_model},
    passes::{AttentionForm, Settings, apply, sequence},
    shapes::Sizes,
};

use crate::foreign::hold;
use crate::runtime_support::{Feeds, cpu, noise, relative_error, run, tensor, webgpu};

/// File, sizes that the exporter has traced for good, attentions, error that is allowed.
const FILES: [(&str, &[(&str, usize)], usize, f32); 8] = [
    ("dit_legacy_rms_f32rope", &[("image_seq", 24), ("text_seq", 64)], 5, 1e-5),
    ("dit_legacy_rms_f32rope_nofold", &[("image_seq", 24), ("text_seq", 64)], 5, 1e-5),
    ("dit_legacy_rms_f32rope_fp16", &[("image_seq", 24), ("text_seq", 64)], 5, 2e-2),
    ("dit_dynamo", &[], 5, 1e-5),
    ("te_legacy", &[], 6, 1e-5),
    ("te_dynamo", &[], 6, 1e-5),
    ("vae_legacy", &[], 1, 1e-5),
    ("vae_dynamo", &[], 1, 1e-5),
];

/// Sizes of a run, for what stays open.
const SIZES: [(&str, usize); 4] =
    [("image_seq", 24), ("text_seq", 64), ("latent_height", 4), ("latent_width", 6)];

fn feeds(model: &Model) -> Feeds {
    let feed = |id: ValueId| {
        let value = &model.graph[id];
        let Some(ValueType::Tensor { dtype, shape: Some(shape) }) = &value.ty else { panic!("no type") };
        let size = |dim: &Dim| match dim {
            Dim::Fixed(size) => *size,
            Dim::Symbol(name) => SIZES.iter().find(|(known, _)| known == name).unwrap().1,
            Dim::Unknown => panic!("unknown size"),
        };
        let (dtype, shape): (DType, Vec<usize>) = (*dtype, shape.iter().map(size).collect());
        let count = shape.iter().product();
        let tensor = match (value.name.as_str(), dtype) {
            ("input_ids", _) => HostTensor::new(
                &shape,
                Values::I64((0..count as i64).map(|i| i * 37 % 288).collect::<Vec<_>>().into()),
            ),
            ("attention_mask", _) => HostTensor::new(
                &shape,
                Values::I64((0..count).map(|i| i64::from(i < 40)).collect::<Vec<_>>().into()),
            ),
            ("x_ids", _) => tensor(
                dtype,
                &shape,
                &(0..count)
                    .map(|i| match i % 4 {
                        1 => i / 24,
                        2 => i / 4 % 6,
                        _ => 0,
                    } as f32)
                    .collect::<Vec<_>>(),
            ),
            ("ctx_ids", _) => tensor(
                dtype,
                &shape,
                &(0..count).map(|i| if i % 4 == 3 { i / 4 } else { 0 } as f32).collect::<Vec<_>>(),
            ),
            _ => tensor(dtype, &shape, &noise(7, count)),
        };
        (value.name.clone(), tensor)
    };
    model.graph.inputs.iter().map(|id| feed(*id)).collect()
}

#[test]
#[ignore = "needs the files in $VIADUCT_SHARED"]
fn webgpu_models_that_torch_exports_are_the_same() {
    let folder = PathBuf::from(std::env::var("VIADUCT_SHARED").unwrap()).join("oracles/onnx-tiny");
    let mut gpu = webgpu();
    for (file, bound, count, bar) in FILES {
        let mut original = read_model(&folder.join(format!("{file}.onnx"))).unwrap();
        hold(&mut original);
        let feeds = feeds(&original);
        let sizes: Sizes = bound.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect();
        let name = original.graph[original.graph.outputs[0]].name.clone();
        let expected = run(&mut cpu(), &original, &feeds, &[&name]).unwrap()[0].to_f32();
        for form in [AttentionForm::Fused, AttentionForm::Written { slices: 1 }] {
            let settings = Settings { sizes: sizes.clone(), attention: form, ..Settings::default() };
            let mut model = original.clone();
            let reports = apply(&mut model, &sequence("webgpu").unwrap(), &settings).unwrap();
            for report in &reports {
                if report.applied > 0 || !report.refused.is_empty() {
                    println!(
                        "  {file} {form:?} {}: {} {:?}",
                        report.pass.name,
                        report.applied,
                        report.reasons()
                    );
                }
            }
            let mut operators = BTreeMap::<_, usize>::new();
            for (_, node) in model.graph.nodes() {
                *operators.entry(node.op_type.clone()).or_default() += 1;
            }
            println!("{file} {operators:?}");
            let fused = if form == AttentionForm::Fused { count } else { 0 };
            assert_eq!(operators.get("MultiHeadAttention").copied().unwrap_or(0), fused, "{file}");
            assert!(!operators.contains_key("IsNaN"), "{file}");
            let y = run(&mut cpu(), &model, &feeds, &[&name]).unwrap()[0].to_f32();
            let error = relative_error(&y, &expected);
            println!("{file} {form:?} CPU: {error:.2e}");
            assert!(error <= bar, "{file}: {error:e}");
            let Some(gpu) = &mut gpu else { continue };
            let device = DeviceProfile { fused_attention: false, ..gpu.runtime.device().profile() };
            let all: Sizes = SIZES.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect();
            lower(&mut model, &device, &all, &[]).unwrap();
            match run(&mut gpu.runtime, &model, &feeds, &[&name]) {
                Ok(y) => {
                    println!("{file} {form:?} WebGPU: {:.2e}", relative_error(&y[0].to_f32(), &expected))
                }
                Err(RuntimeError::CpuNodes { nodes, .. }) => {
                    println!("{file} {form:?} on the CPU: {nodes:?}");
                    let of_attention =
                        |node: &String| ["MatMul", "Softmax", "Where"].iter().any(|op| node.starts_with(op));
                    assert!(!nodes.iter().any(of_attention), "{file}: {nodes:?}");
                }
                Err(e) => println!("{file}: {e}"),
            }
        }
    }
}

/// A graph of f16 whose weights are absent: heads of 512, and a scale that is computed at run time.
#[test]
#[ignore = "needs the files in $VIADUCT_SHARED"]
fn the_full_decoder_is_fused_without_its_weights() {
    let folder = PathBuf::from(std::env::var("VIADUCT_SHARED").unwrap());
    let mut model = read_graph(&folder.join("oracles/onnx-full/flux2_vae_decoder.onnx")).unwrap();
    let fused = sequence("webgpu").unwrap();
    let reports = apply(&mut model, &fused, &Settings::default()).unwrap();
    for report in reports {
        println!("{}: {} {:?}", report.pass.name, report.applied, report.reasons());
    }
    let attention = model.graph.nodes().find(|(_, node)| node.is_contrib("MultiHeadAttention")).unwrap().1;
    assert_eq!(attention.int("num_heads"), Some(1));
    assert!((attention.float("scale").unwrap() - 512f32.sqrt().recip()).abs() < 1e-4);
}
