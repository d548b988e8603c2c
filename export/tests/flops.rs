//! Operations of FLUX.2 Klein 4B at full size, against figures that were worked out by hand from its dimensions.

use viaduct_export::{
    arch::{SizesRequest, TextRows},
    bundle::{Outline, OutlineRequest, OutlineSource, Stages},
    flops::flops,
    shapes::infer,
};

/// 10^12 operations of a stage at a square size.
fn tera(outline: &Outline, stage: &str, side: usize) -> f64 {
    let request = SizesRequest { width: side, height: side, steps: 4, halvings: 0, text: TextRows::all(512) };
    let model = outline.model(stage).unwrap();
    let counted = flops(&model, &infer(&model, &outline.sizes(&request).unwrap(), &Default::default()));
    assert!(counted.is_complete(), "{stage}: {:?}", counted.unknown);
    counted.total as f64 / 1e12
}

#[track_caller]
fn assert_near(counted: f64, expected: f64) {
    assert!((counted / expected - 1.0).abs() < 0.02, "{counted} TFLOP, not {expected}");
}

#[test]
fn klein_4b_has_its_operations() {
    for profile in ["f16", "q4"] {
        let source = OutlineSource::Recipe("flux2-klein-4b");
        let outline = Outline::author(&OutlineRequest { source, profile, set: &[] }).unwrap();
        // 28.3 of linear layers and 6.5 of attention over 4096 and 512 tokens; 1024 and 512.
        assert_near(tera(&outline, "transformer", 1024), 34.8);
        assert_near(tera(&outline, "transformer", 512), 10.1);
        // 27 layers of 100.9 M weights over 512 rows, and attention over all pairs of rows.
        assert_near(tera(&outline, "text_encoder", 512), 2.79 + 0.116);
    }
}
