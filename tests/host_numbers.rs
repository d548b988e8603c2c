//! The pipeline's host code against tensors of the reference implementation.
//!
//! Each comparison has a negative control: a plausible mistake that must be far away.

use std::path::{Path, PathBuf};

use viaduct::npy;
use viaduct::pipeline::image::{Picture, psnr};
use viaduct::pipeline::noise::{draw_latents, pack_latents, torch_randn, unpack_latents};
use viaduct::pipeline::position::{TextIds, image_ids, rope_tables, text_ids};
use viaduct::pipeline::prompt::PromptEncoder;
use viaduct::pipeline::schedule::Schedule;
use viaduct::tensor::{HostTensor, Values};

const EMOJI: [&str; 2] = ["klein-emoji/0", "klein-emoji/1"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn fixture(folder: &str) -> PathBuf {
    root().join("tests/fixtures").join(folder)
}

fn tensor(folder: &str, name: &str) -> HostTensor {
    npy::read(&fixture(folder).join(name).with_extension("npy")).unwrap()
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn request(folder: &str) -> serde_json::Value {
    json(&fixture(folder).join("request.json"))
}

/// The greatest absolute difference.
fn difference(a: &HostTensor, b: &HostTensor) -> f32 {
    assert_eq!(a.shape, b.shape);
    a.to_f32().iter().zip(b.to_f32()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn bits(values: &[f32]) -> Vec<String> {
    values.iter().map(|x| format!("{:08x}", x.to_bits())).collect()
}

#[test]
fn noise_is_torch_randn_to_the_bit() {
    let fixture = json(&fixture("torch_randn.json"));
    let draws = fixture["draws"].as_array().unwrap();
    assert!(draws.len() > 30);
    for draw in draws {
        let (seed, size) = (draw["seed"].as_u64().unwrap(), draw["size"].as_u64().unwrap() as usize);
        let values = torch_randn(seed, size);
        assert_eq!(values.len(), size);
        let strings = |key: &str| -> Option<Vec<String>> { serde_json::from_value(draw[key].clone()).ok() };
        match strings("values") {
            Some(all) => assert_eq!(bits(&values), all, "seed {seed}, size {size}"),
            None => {
                let (first, last) = (strings("first").unwrap(), strings("last").unwrap());
                assert_eq!(bits(&values[..first.len()]), first, "seed {seed}, size {size}");
                assert_eq!(bits(&values[size - last.len()..]), last, "seed {seed}, size {size}");
                let sum: f64 = values.iter().map(|x| f64::from(*x)).sum();
                assert!((sum - draw["sum"].as_f64().unwrap()).abs() < 1e-6, "seed {seed}, size {size}");
            }
        }
    }
}

#[test]
fn latents_are_drawn_as_diffusers_draws_them() {
    for folder in EMOJI {
        let seed = request(folder)["seed"].as_u64().unwrap();
        let noise = tensor(folder, "noise_nchw");
        let [1, channels, height, width] = noise.shape[..] else { panic!("{:?}", noise.shape) };
        assert_eq!(draw_latents(seed, channels, height, width), noise);
        assert!(difference(&draw_latents(seed + 1, channels, height, width), &noise) > 1.0);
    }
}

#[test]
fn schedule_and_euler_steps_are_exact() {
    for folder in EMOJI.into_iter().chain(["flux2-a/oracle"]) {
        let steps = request(folder)["steps"].as_u64().unwrap() as usize;
        let noise = tensor(folder, "noise_nchw");
        let (height, width) = (noise.shape[2], noise.shape[3]);
        let schedule = Schedule::flux2(height * width, steps).unwrap();
        let sigmas = HostTensor::f32(&[steps + 1], schedule.sigmas().to_vec());
        assert_eq!(sigmas, tensor(folder, "sigmas"));
        let other = Schedule::shifted(0.63, steps).unwrap();
        assert!(difference(&sigmas, &HostTensor::f32(&[steps + 1], other.sigmas().to_vec())) > 0.1);

        let mut latents = pack_latents(&noise).unwrap();
        assert_eq!(unpack_latents(&latents, height, width).unwrap(), noise);
        for step in 0..steps {
            schedule.euler_step(step, &mut latents, &tensor(folder, &format!("pred_step{step}"))).unwrap();
            assert_eq!(latents, tensor(folder, &format!("latents_step{step}")), "{folder}, step {step}");
        }
    }
}

#[test]
fn ids_and_rotary_tables_are_the_reference() {
    let folder = "flux2-a/oracle";
    let config = json(&fixture("flux2-a/checkpoint.json"))["transformer"]["config"].clone();
    let axes: Vec<usize> = serde_json::from_value(config["axes_dims_rope"].clone()).unwrap();
    let theta = config["rope_theta"].as_f64().unwrap();
    let noise = tensor(folder, "noise_nchw");
    let image = image_ids(0, noise.shape[2], noise.shape[3]);
    let length = request(folder)["text_length"].as_u64().unwrap() as usize;
    let flat = |ids: &[[i64; 4]]| Values::I64(ids.as_flattened().to_vec().into());
    assert_eq!(flat(&image), tensor(folder, "img_ids").values);

    let tables = |numbering| {
        let text = text_ids(length, numbering);
        (flat(&text), rope_tables(&[text, image.clone()].concat(), &axes, theta).unwrap())
    };
    let (ids, (cos, sin)) = tables(TextIds::Index);
    assert_eq!(ids, tensor(folder, "txt_ids").values);
    // The reference repeats every angle for both dims of its pair.
    let pairs = |name| {
        let doubled = tensor(folder, name);
        let (values, _) = (doubled.to_f32(), assert_eq!(doubled.shape[1], 2 * cos.shape[1]));
        assert!(values.as_chunks::<2>().0.iter().all(|[a, b]| a == b));
        HostTensor::f32(&cos.shape, values.into_iter().step_by(2).collect())
    };
    assert!(difference(&cos, &pairs("rope_cos")) <= 6e-8, "{}", difference(&cos, &pairs("rope_cos")));
    assert!(difference(&sin, &pairs("rope_sin")) <= 6e-8, "{}", difference(&sin, &pairs("rope_sin")));
    let (_, (zero_cos, _)) = tables(TextIds::Zero);
    assert!(difference(&zero_cos, &pairs("rope_cos")) > 1.0);
}

#[test]
fn prompts_become_the_reference_ids() {
    let encoder = PromptEncoder::load(&root().join("bundles/klein-emoji/source/tokenizer")).unwrap();
    let pad = 2022;
    for folder in EMOJI {
        let request = request(folder);
        let prompt = request["prompt"].as_str().unwrap();
        let length = request["text_length"].as_u64().unwrap() as usize;
        let encoded = encoder.encode(prompt, length, pad).unwrap();
        assert_eq!(encoded.ids, tensor(folder, "input_ids"));
        assert_eq!(encoded.mask, tensor(folder, "attention_mask"));
        assert_eq!(encoded.truncated, 0);
        assert_ne!(encoder.encode(&prompt.to_uppercase(), length, pad).unwrap().ids, encoded.ids);

        let short = encoder.encode(prompt, 3, pad).unwrap();
        assert_eq!((short.tokens, short.truncated), (3, encoded.tokens - 3));
        let Values::I64(ids) = &encoded.ids.values else { panic!("ids are i64") };
        assert_eq!(short.ids, HostTensor::i64(&[1, 3], ids[..3].to_vec()));
    }
}

#[test]
fn pictures_are_the_reference_to_the_byte() {
    for folder in EMOJI {
        let raw = tensor(folder, "image_raw");
        let picture = Picture::from_tensor(&raw).unwrap();
        let png = std::fs::read(fixture(folder).join("image.png")).unwrap();
        assert_eq!(picture, Picture::from_png(&png).unwrap());
        // Only the rounding to bytes is between the two: at most half of 1/255.
        assert!(psnr(&picture.to_tensor(), &tensor(folder, "image_01")).unwrap() > 54.0);
        assert!(psnr(&picture.to_tensor(), &raw).unwrap() < 20.0);
    }
}
