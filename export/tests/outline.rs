//! Outlines: a bundle's graphs from configs alone, equal to those of an export but for the weights' values.

mod checkpoint_keys;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use checkpoint_keys::published;
use serde_json::Value as Json;
use viaduct_export::{
    arch::{MAX_STEPS, SizesError, SizesRequest, TextRows},
    bundle::{Bundle, ExportError, ExportRequest, Outline, OutlineRequest, OutlineSource, Stages, export},
    onnx::{DType, Dim, Graph, Model, ValueId, ValueType, WriteOptions, write_model_with},
};
use viaduct_procedural::write_checkpoint;

type Settings = Vec<(String, String)>;

fn settings(set: &[(&str, &str)]) -> Settings {
    set.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn outline(recipe: &str, profile: &str, set: &[(&str, &str)]) -> Result<Outline, ExportError> {
    let set = settings(set);
    Outline::author(&OutlineRequest { source: OutlineSource::Recipe(recipe), profile, set: &set })
}

fn refusal(recipe: &str, set: &[(&str, &str)]) -> String {
    match outline(recipe, "q8", set) {
        Ok(_) => panic!("{recipe} with {set:?} is accepted"),
        Err(error) => error.to_string(),
    }
}

/// Everything of a graph but the values of large constants: what is known of each value, and the nodes.
fn facts(graph: &Graph) -> Vec<String> {
    let values = graph.values().map(|(_, value)| {
        let constant = value.constant.as_ref().map(|t| (t.dtype, t.shape.clone(), t.bytes.len()));
        format!("{} {:?} {constant:?}", value.name, value.ty)
    });
    let name = |id: Option<ValueId>| id.map_or("", |id| graph[id].name.as_str());
    let nodes = graph.nodes().map(|(_, node)| {
        let inputs: Vec<&str> = node.inputs.iter().map(|id| name(*id)).collect();
        let outputs: Vec<&str> = node.outputs.iter().map(|id| name(*id)).collect();
        format!("{} {} {inputs:?} {outputs:?} {:?}", node.name, node.op_type, node.attributes)
    });
    let ports = [&graph.inputs, &graph.outputs].into_iter().flatten().map(|id| graph[*id].name.clone());
    let mut values: Vec<String> = values.collect();
    // A file may hold them in another order than they were made in.
    values.sort();
    values.into_iter().chain(nodes).chain(ports).collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A recipe in `folder` that carries the configs of a checkpoint.
fn recipe_of(checkpoint: &Path, folder: &Path) -> PathBuf {
    let mut text = "base = \"flux2-klein\"\nname = \"test\"\n".to_owned();
    for component in ["text_encoder", "transformer", "vae"] {
        let config = fs::read(checkpoint.join(component).join("config.json")).unwrap();
        let mut config: Json = serde_json::from_slice(&config).unwrap();
        let keys = config.as_object_mut().unwrap();
        if component == "text_encoder" && keys.get("pad_token_id").is_none_or(Json::is_null) {
            keys.insert("pad_token_id".to_owned(), PAD_ID.into());
        }
        keys.retain(|_, value| !value.is_null());
        text += &format!("[configs.{component}]\n{}\n", toml_of(&config));
    }
    let path = folder.join("outline.toml");
    fs::write(&path, text).unwrap();
    path
}

/// Padding of the test checkpoints' tokenizer.
const PAD_ID: i64 = 256;

/// A flat object as TOML; nested ones inline.
fn toml_of(object: &Json) -> String {
    let line = |(key, value): (&String, &Json)| format!("{key} = {}", inline(value));
    object.as_object().unwrap().iter().map(line).collect::<Vec<_>>().join("\n")
}

fn inline(value: &Json) -> String {
    match value {
        Json::Object(map) => {
            let entries = map.iter().map(|(key, value)| format!("{key} = {}", inline(value)));
            format!("{{ {} }}", entries.collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

/// A checkpoint, with the settings that it needs.
fn checkpoints() -> Vec<(PathBuf, Settings, Option<tempfile::TempDir>)> {
    let emoji = root().join("bundles/klein-emoji/source");
    let mut all =
        vec![(emoji, settings(&[("text_encoder.taps", "2,4,6"), ("text_encoder.length", "64")]), None)];
    for (fixture, taps, length) in [("flux2-a", "1,3,4", "40"), ("flux2-b", "2,3", "24")] {
        let folder = tempfile::tempdir().unwrap();
        let spec = root().join("tests/fixtures").join(fixture).join("checkpoint.json");
        write_checkpoint(&spec, folder.path()).unwrap();
        let set = settings(&[("text_encoder.taps", taps), ("text_encoder.length", length)]);
        all.push((folder.path().to_owned(), set, Some(folder)));
    }
    all
}

/// Outline and bundle must tell a planner the same.
fn assert_same(outline: &Outline, bundle: &Bundle, case: &str) {
    assert_eq!(outline.family(), bundle.family());
    assert_eq!(outline.profile(), bundle.profile());
    assert_eq!(outline.family_parameters(), bundle.family_parameters(), "{case}");
    assert_eq!(outline.stage_names(), bundle.stage_names(), "{case}");
    for name in outline.stage_names() {
        let models: [Model; 2] = [outline.model(name).unwrap(), bundle.model(name).unwrap()];
        let [ours, theirs] = models.each_ref().map(|model| facts(&model.graph));
        for (ours, theirs) in ours.iter().zip(&theirs) {
            assert_eq!(ours, theirs, "{case} {name}");
        }
        assert_eq!(ours.len(), theirs.len(), "{case} {name}");
        assert_eq!(models[0].opsets, models[1].opsets);
    }
    for (path, bytes) in &outline.raw_files {
        let written = bundle.manifest.files.iter().find(|file| file.path == *path).unwrap();
        assert_eq!(written.bytes, *bytes, "{case}");
    }
}

#[test]
fn configs_alone_give_the_exported_graphs() {
    for (checkpoint, set, _folder) in checkpoints() {
        let folder = tempfile::tempdir().unwrap();
        let recipe = recipe_of(&checkpoint, folder.path());
        for profile in ["f32", "f16", "q8", "q4"] {
            let case = format!("{} {profile}", checkpoint.display());
            let out = folder.path().join(profile);
            let (source, fault) = (checkpoint.as_path(), None);
            let recipe = recipe.to_str();
            let request = ExportRequest {
                source,
                arrivals: None,
                out: &out,
                recipe,
                profile,
                calibration: None,
                target_bytes: None,
                set: &set,
                force: false,
                fault,
            };
            export(&request, &mut |_| ()).unwrap();
            let bundle = Bundle::open(&out).unwrap();
            assert!(!bundle.manifest.recipe.sections.contains_key("configs"), "the checkpoint's own count");

            let request =
                OutlineRequest { source: OutlineSource::Recipe(recipe.unwrap()), profile, set: &set };
            let from_recipe = Outline::author(&request).unwrap();
            assert_same(&from_recipe, &bundle, &case);
            let source = OutlineSource::Checkpoint { folder: &checkpoint, recipe };
            let from_files = Outline::author(&OutlineRequest { source, ..request }).unwrap();
            assert_same(&from_files, &bundle, &case);
        }
    }
}

/// Config files suffice: a download of a few kilobytes.
#[test]
fn a_folder_without_weights_has_an_outline() {
    let folder = tempfile::tempdir().unwrap();
    let emoji = root().join("bundles/klein-emoji/source");
    for file in ["text_encoder/config.json", "transformer/config.json", "vae/config.json", "recipe.toml"] {
        fs::create_dir_all(folder.path().join(file).parent().unwrap()).unwrap();
        fs::copy(emoji.join(file), folder.path().join(file)).unwrap();
    }
    let source = OutlineSource::Checkpoint { folder: folder.path(), recipe: None };
    let outline = Outline::author(&OutlineRequest { source, profile: "q4", set: &[] }).unwrap();
    assert_eq!(outline.name(), "klein-emoji");
    assert!(outline.stages.len() >= 6);
}

/// The tensors that an f32 outline's graphs hold, in the shapes that a checkpoint has.
fn asked_for(outline: &Outline) -> BTreeMap<String, Vec<usize>> {
    let mut tensors: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    let values = outline.stages.iter().flat_map(|stage| stage.model.graph.values());
    for (_, value) in values {
        let Some(constant) = &value.constant else { continue };
        // Some weights are stored in parts, by columns: `to_out.weight[:,0:3072]`.
        let (name, columns) = value.name.split_at(value.name.find('[').unwrap_or(value.name.len()));
        if !name.ends_with(".weight") && !name.ends_with(".bias") {
            continue;
        }
        let shape = match constant.shape[..] {
            // Matrices are stored transposed, norms of channels as columns.
            [inputs, outputs] => vec![outputs, inputs],
            [channels, 1, 1] => vec![channels],
            ref other => other.to_vec(),
        };
        match tensors.get_mut(name) {
            Some(whole) if !columns.is_empty() => whole[1] += shape[1],
            found => {
                assert_eq!(found, None, "{} twice", value.name);
                tensors.insert(name.to_owned(), shape);
            }
        }
    }
    tensors
}

#[test]
fn recipes_ask_for_the_published_tensors() {
    for recipe in ["flux2-klein-4b", "flux2-klein-9b"] {
        let outline = outline(recipe, "f32", &[]).unwrap();
        let mut expected = published(recipe);
        assert!(expected.len() > 300, "{recipe}");
        // Packed channels of the latents; the graph holds what follows from these two.
        let channels = Some(vec![128]);
        assert_eq!(expected.remove("bn.running_mean"), channels);
        assert_eq!(expected.remove("bn.running_var"), channels);
        let mut asked = asked_for(&outline);
        match expected.remove("model.embed_tokens.weight") {
            Some(table) => {
                let bytes = 4 * table.iter().product::<usize>() as u64;
                assert_eq!(outline.raw_files, [("embedding.bin".to_owned(), bytes)]);
            }
            // No list of this one's text encoder was at hand: it is that of Qwen3-8B.
            None => {
                asked.retain(|name, _| !name.starts_with("model."));
                let bytes = 4 * 151936 * 4096;
                assert_eq!(outline.raw_files, [("embedding.bin".to_owned(), bytes)]);
            }
        }
        for (name, shape) in &expected {
            assert_eq!(asked.get(name), Some(shape), "{recipe}: {name}");
        }
        assert_eq!(asked.len(), expected.len(), "{recipe}");
    }
}

#[test]
fn a_full_size_model_has_its_sizes_and_lengths() {
    let outline = outline("flux2-klein-4b", "q4", &[]).unwrap();
    let request = SizesRequest { width: 1024, height: 1024, steps: 4, halvings: 0, text: TextRows::all(512) };
    let sizes = outline.sizes(&request).unwrap();
    assert_eq!((sizes["image_seq"], sizes["joint_seq"], sizes["kv_rows"]), (4096, 4608, 16384));
    let transformer = outline.model("transformer").unwrap();
    let bytes = transformer.constant_bytes();
    // 3.7 G weights: half a byte each, a scale of 2 bytes and a zero point of half a byte for 32.
    assert!((1_900_000_000..2_300_000_000).contains(&bytes), "{bytes}");
}

#[test]
fn illegal_pictures_have_no_sizes() {
    let outline = outline("flux2-klein-4b", "q8", &[]).unwrap();
    let legal = SizesRequest { width: 1024, height: 1024, steps: 4, halvings: 4, text: TextRows::all(512) };
    assert_eq!(outline.sizes(&legal).unwrap()["chunk_rows"], 64);
    let refused = |request: SizesRequest| outline.sizes(&request).unwrap_err();
    for width in [0, 1000, 16400, usize::MAX] {
        let error = refused(SizesRequest { width, ..legal });
        assert!(matches!(error, SizesError::Picture(_)), "{error}");
        assert!(error.to_string().contains("width"), "{error}");
    }
    for steps in [0, MAX_STEPS + 1, usize::MAX] {
        assert!(matches!(refused(SizesRequest { steps, ..legal }), SizesError::Steps { .. }));
    }
}

/// Only the places where one stage ends differ: every weight of the decoder is there once.
#[test]
fn the_decoder_can_be_cut_otherwise() {
    let outline = outline("flux2-klein-4b", "q8", &[]).unwrap();
    let names = |cuts: &[usize]| {
        let stages = outline.decoder(cuts).unwrap().stages;
        let bytes: u64 = stages.iter().map(|stage| weight_bytes(&stage.model)).sum();
        (stages.into_iter().map(|stage| stage.name).collect::<Vec<_>>(), bytes)
    };
    let (whole, bytes) = names(&[]);
    assert_eq!(whole, ["vae_pre", "vae_attention", "vae_post0"]);
    let (most, same) = names(&[1, 2, 3]);
    assert_eq!(most.len(), 6);
    assert_eq!(same, bytes);
    // The recipe's own: the stages of the outline.
    let (own, _) = names(&[1]);
    assert!(outline.stage_names().ends_with(&own.iter().map(String::as_str).collect::<Vec<_>>()));
    for stage in outline.decoder(&[1]).unwrap().stages {
        assert_eq!(facts(&stage.model.graph), facts(&outline.model(&stage.name).unwrap().graph));
    }
}

/// Stages and parameters are those of an outline that is cut so from the start.
#[test]
fn a_decoder_that_is_cut_otherwise_has_the_parameters_of_its_cuts() {
    for (recipe, most) in [("flux2-klein-4b", "1,2,3"), ("qwen-image-2.1", "1,2,3,4")] {
        let own = outline(recipe, "q8", &[]).unwrap();
        for set in ["", "2", most] {
            let whole = outline(recipe, "q8", &[("vae_decoder.cuts", set)]).unwrap();
            let cuts: Vec<usize> = set.split(',').filter_map(|cut| cut.parse().ok()).collect();
            let decoder = own.decoder(&cuts).unwrap();
            assert_eq!(decoder.parameters, whole.parameters, "{recipe} {set}");
            assert!(whole.stage_names().ends_with(&decoder.stage_names()), "{recipe} {set}");
        }
    }
}

/// A stage takes what the one before gives, and upsamples it itself.
#[test]
fn what_the_decoder_hands_over_is_not_yet_upsampled() {
    let outline = outline("flux2-klein-4b", "q8", &[]).unwrap();
    let stages = outline.decoder(&[1, 3]).unwrap().stages;
    let handed = [("vae_up0_res", 512, "mid"), ("vae_up2_res", 256, "up1")];
    for (pair, (name, channels, place)) in stages[2..].windows(2).zip(handed) {
        let [before, after] = [&pair[0].model.graph, &pair[1].model.graph];
        let sides = ["height", "width"].map(|side| Dim::Symbol(format!("{place}_{side}")));
        let dims = [&[Dim::Fixed(1), Dim::Fixed(channels)][..], &sides].concat();
        let expected = Some(ValueType::Tensor { dtype: DType::F16, shape: Some(dims) });
        for (graph, port) in [(before, before.outputs[0]), (after, after.inputs[0])] {
            assert_eq!((graph[port].name.as_str(), &graph[port].ty), (name, &expected));
        }
    }
}

fn weight_bytes(model: &Model) -> u64 {
    let named = model.graph.values().filter(|(_, value)| value.name.starts_with("decoder."));
    named.filter_map(|(_, value)| Some(value.constant.as_ref()?.bytes.len() as u64)).sum()
}

#[test]
fn nothing_of_an_outline_can_be_written() {
    let outline = outline("flux2-klein-4b", "q8", &[]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for stage in outline.stages.iter().filter(|stage| stage.name != "vae_attention") {
        let path = folder.path().join(format!("{}.onnx", stage.name));
        let error = write_model_with(&stage.model, &path, &WriteOptions::default(), &mut |_| ());
        let error = format!("{:#}", error.unwrap_err());
        assert!(error.contains("without a checkpoint"), "{}: {error}", stage.name);
        assert!(!path.exists(), "{}", stage.name);
    }
}

#[test]
fn absurd_configs_are_refused() {
    let cases: [(&[(&str, &str)], &str); 9] = [
        (&[("configs.transformer.num_layers", "1000000000")], "num_layers is 1000000000"),
        (&[("configs.transformer.num_single_layers", "1000000000")], "num_single_layers"),
        (&[("configs.text_encoder.num_hidden_layers", "1000000000")], "num_hidden_layers"),
        (&[("configs.vae.layers_per_block", "1000000000")], "layers_per_block"),
        (&[("configs.text_encoder.hidden_size", "4294967295")], "hidden_size is 4294967295"),
        (&[("configs.transformer.num_attention_heads", "16777216")], "heads x attention_head_dim"),
        (&[("configs.vae.block_out_channels", "128,256,512,4294967264")], "65536"),
        (&[("configs.text_encoder.num_attention_heads", "0")], "num_attention_heads is 0"),
        (&[("configs.transformer.axes_dims_rope", "4294967295,4294967295,2,2")], "axes_dims_rope"),
    ];
    for (set, part) in cases {
        for recipe in ["flux2-klein-4b", "flux2-klein-9b"] {
            let error = refusal(recipe, set);
            assert!(error.contains(part) && error.contains("[configs."), "{set:?}: {error}");
        }
    }
    // Large and legal: it takes no more memory than the small one.
    let huge = [("configs.text_encoder.vocab_size", "16777216"), ("profiles.q8.block", "16")];
    outline("flux2-klein-4b", "q8", &huge).unwrap();
}

#[test]
fn recipes_without_full_configs_are_refused() {
    let error = refusal("flux2-klein", &[]);
    assert!(error.contains("[configs]") && error.contains("flux2-klein-4b, flux2-klein-9b"), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let file = |text: &str| {
        let path = folder.path().join("r.toml");
        fs::write(&path, text).unwrap();
        refusal(path.to_str().unwrap(), &[])
    };
    let error = file("base = \"flux2-klein\"\n[configs.vae]\nlatent_channels = 32");
    assert!(error.contains("[configs]: missing field"), "{error}");
    let error = file("base = \"flux2-klein-4b\"\n[configs.unet]\nwidth = 3");
    assert!(error.contains("unet"), "{error}");
    let error = file("base = \"flux2-klein-4b\"\nfamily = \"sdxl\"");
    assert!(error.contains("'sdxl'"), "{error}");
    let error = file("base = \"flux2-klein-4b\"\n[configs.vae]\nlatent_channels = \"many\"");
    assert!(error.contains("latent_channels"), "{error}");
    let error = file("base = \"flux2-klein-4b\"\n[configs.vae]\nlatent_channels = -1");
    assert!(error.contains("latent_channels") || error.contains("-1"), "{error}");
    let no_pad = fs::read_to_string(root().join("export/recipes/flux2-klein-4b.toml")).unwrap();
    let error = file(&no_pad.replace("pad_token_id", "padding_id"));
    assert!(error.contains("[configs.text_encoder]: pad_token_id is missing"), "{error}");
}

/// An export reads config files; a setting that it would ignore is refused.
#[test]
fn configs_cannot_be_set_for_an_export() {
    let folder = tempfile::tempdir().unwrap();
    let set = settings(&[("configs.transformer.num_layers", "3")]);
    let request = ExportRequest {
        source: &root().join("bundles/klein-emoji/source"),
        arrivals: None,
        out: &folder.path().join("bundle"),
        recipe: Some("flux2-klein-4b"),
        profile: "q8",
        calibration: None,
        target_bytes: None,
        set: &set,
        force: false,
        fault: None,
    };
    let error = export(&request, &mut |_| ()).unwrap_err().to_string();
    assert!(error.contains("configs.transformer.num_layers"), "{error}");
}
