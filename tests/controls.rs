//! `viaduct verify` goes red: a fault is noticed, at the boundary where it is made.

mod support;

use serde_json::Value;
use support::{Checkpoint, oracle};
use viaduct_export::arch::flux2::FAULTS;

/// Each fault that an export can be planted with, and the first boundary that it moves.
const FIRST_MISSED: &[(&str, &str)] = &[
    ("rope_half_split", "dit_double0_img"),
    ("swiglu_swapped", "dit_double0_img"),
    // Every block is right; only the last modulation is not.
    ("norm_out_swapped", "dit_norm_out"),
    ("time_sin_first", "dit_temb"),
    ("text_ids_zero", "txt_ids"),
    ("no_pad_mask", "prompt_embeds (padding rows)"),
];

fn missed(report: &Value) -> Vec<&str> {
    let rows = report["rows"].as_array().unwrap().iter();
    rows.filter(|row| row["outcome"] == "missed").map(|row| row["name"].as_str().unwrap()).collect()
}

#[test]
fn each_fault_is_found_where_it_is_made() {
    let mut known: Vec<&str> = FIRST_MISSED.iter().map(|row| row.0).collect();
    known.sort_unstable();
    let mut faults = FAULTS.to_vec();
    faults.sort_unstable();
    assert_eq!(known, faults);

    let (checkpoint, oracle) = (Checkpoint::of_fixture("flux2-a"), oracle("flux2-a"));
    assert!(missed(&checkpoint.export("f32", &[]).verify(&oracle, "cpu", 0)).is_empty());
    for (fault, first) in FIRST_MISSED {
        let report = checkpoint.export_with_fault("f32", fault).verify(&oracle, "cpu", 3);
        let missed = missed(&report);
        println!("{fault}: {missed:?}");
        assert_eq!(missed[0], *first, "{fault}");
        assert!(missed.contains(&"image_01"), "{fault}: the picture is right all the same");
    }
}

/// The mask is used nowhere after the text encoder, and what that makes of real rows does not depend on it.
#[test]
fn a_missing_mask_moves_the_padding_rows_only() {
    let bundle = Checkpoint::of_fixture("flux2-a").export_with_fault("f32", "no_pad_mask");
    let report = bundle.verify(&oracle("flux2-a"), "cpu", 3);
    let mut missed = missed(&report);
    missed.dedup();
    assert_eq!(missed, ["prompt_embeds (padding rows)", "image_01"]);
}

/// The wide bars of 8-bit weights hide no fault of a trained model.
#[test]
fn faults_show_through_quantisation() {
    let (checkpoint, oracle) = (Checkpoint::klein_emoji(), oracle("klein-emoji/0"));
    for fault in FAULTS {
        let report = checkpoint.export_with_fault("q8", fault).verify(&oracle, "cpu", 3);
        let missed = missed(&report);
        println!("{fault}: {missed:?}");
        assert!(missed.len() > 1 && missed.contains(&"image_01"), "{fault}: {missed:?}");
    }
}

#[test]
fn every_bar_can_be_missed() {
    let (checkpoint, oracle) = (Checkpoint::klein_emoji(), oracle("klein-emoji/0"));
    let missed_with = |set: &str| {
        let report = checkpoint.export("q4", &[set]).verify(&oracle, "cpu", 3);
        missed(&report).into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(missed_with("gates.q4.image_db=40.0"), ["image_01"]);
    let to_f32 = missed_with("gates.q4.tensor=5e-5");
    assert_eq!(to_f32[0], "prompt_embeds (real rows)");
    assert!(to_f32.contains(&"pred_step3".to_owned()) && to_f32.contains(&"image_raw".to_owned()));
    assert!(!to_f32.contains(&"image_01".to_owned()));
}
