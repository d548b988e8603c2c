//! Checks of numbers that several families read from configs, recipes and bundles.

/// The recipe's value with the up blocks before which a stage of the decoder begins.
pub const CUTS: &str = "vae_decoder.cuts";

/// Whether a rotary base makes angles.
pub fn is_base(theta: f64) -> bool {
    theta.is_finite() && theta > 0.0
}

/// Refuses what is no rotary base among a bundle's parameters.
pub fn check_base(key: &str, theta: f64) -> Result<(), String> {
    match is_base(theta) {
        true => Ok(()),
        false => Err(format!("{key} is {theta}; expected a finite number above 0")),
    }
}

/// Whether a norm can add it to a variance.
pub fn is_epsilon(epsilon: f64) -> bool {
    epsilon > 0.0 && epsilon <= 1.0
}

/// Refuses cuts of a decoder before blocks that it does not have, of which it has `blocks`: the cut, and what is expected. One
/// with a single block is never cut, whatever a family's recipe says.
pub fn check_cuts(cuts: &[usize], blocks: usize) -> Result<(), (usize, String)> {
    match cuts.iter().find(|cut| !(1..blocks).contains(*cut)) {
        Some(cut) if blocks > 1 => {
            Err((*cut, format!("the decoder's up blocks that it can be cut before are 1 to {}", blocks - 1)))
        }
        _ => Ok(()),
    }
}
