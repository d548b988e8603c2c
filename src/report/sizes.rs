//! The sizes that a picture gives to the graphs of a bundle.

use viaduct_export::{
    arch::flux2::parameters::Parameters,
    bundle::{Bundle, BundleError, MANIFEST},
    shapes::Sizes,
};

use crate::pipeline::size::{Size, SizeError};

/// The most steps that a run may take.
const MAX_STEPS: usize = 1000;

/// What is to be drawn.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Drawn {
    pub width: usize,
    pub height: usize,
    pub steps: usize,
}

#[derive(Debug, thiserror::Error)]
pub enum SizesError {
    #[error(transparent)]
    Bundle(#[from] BundleError),
    #[error(transparent)]
    Size(#[from] SizeError),
    #[error("--steps {0}: a picture takes 1 to {MAX_STEPS} steps")]
    Steps(usize),
    #[error("the bundle is of family '{0}', of which no sizes are known; bind them with --dim")]
    Family(String),
    #[error("{manifest}: parameters: {problem}")]
    Parameters { manifest: String, problem: String },
}

/// What is drawn if nothing else is asked for, and the sizes of all symbols of the bundle's graphs.
pub fn bundle_sizes(
    bundle: &Bundle,
    [width, height, steps]: [Option<usize>; 3],
) -> Result<(Drawn, Sizes), SizesError> {
    if bundle.manifest.family != "flux2" {
        return Err(SizesError::Family(bundle.manifest.family.clone()));
    }
    let parameters: Parameters = bundle.parameters()?;
    parameters.check().map_err(|problem| {
        let manifest = bundle.folder.join(MANIFEST).display().to_string();
        SizesError::Parameters { manifest, problem }
    })?;
    let own = parameters.vae.default_side;
    let (width, height) = (width.unwrap_or(own), height.unwrap_or(own));
    let size = Size::new(width, height, parameters.vae.pixels_per_token)?;
    let steps = steps.unwrap_or(parameters.schedule.steps);
    if !(1..=MAX_STEPS).contains(&steps) {
        return Err(SizesError::Steps(steps));
    }
    Ok((Drawn { width, height, steps }, flux2_sizes(&parameters, size, steps)))
}

fn flux2_sizes(parameters: &Parameters, size: Size, steps: usize) -> Sizes {
    let vae = &parameters.vae;
    let [rows, columns] = size.grid();
    let [mid_height, mid_width] = [rows, columns].map(|n| n * vae.pixels_per_token / vae.downscale);
    let middle = mid_height * mid_width;
    let mut sizes = vec![
        ("steps".to_owned(), steps),
        ("image_seq".to_owned(), size.tokens()),
        ("joint_seq".to_owned(), parameters.text.length + size.tokens()),
        ("latent_height".to_owned(), rows),
        ("latent_width".to_owned(), columns),
        ("mid_height".to_owned(), mid_height),
        ("mid_width".to_owned(), mid_width),
        ("kv_rows".to_owned(), middle),
        ("chunk_rows".to_owned(), vae.attention_rows.unwrap_or(middle).min(middle)),
        ("image_height".to_owned(), size.height()),
        ("image_width".to_owned(), size.width()),
    ];
    // Each level of the decoder doubles the sides.
    for level in (1..).take_while(|level| 1 << level <= vae.downscale) {
        sizes.push((format!("up{level}_height"), mid_height << level));
        sizes.push((format!("up{level}_width"), mid_width << level));
    }
    sizes.into_iter().collect()
}
