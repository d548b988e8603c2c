//! `viaduct doctor`

use clap::Args;

use super::DeviceArguments;

/// Show the adapters, drivers, limits and runtime versions, and what to install if something is missing.
#[derive(Args)]
pub struct Arguments {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArguments,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let _ = (arguments.json, &arguments.device);
    Ok(())
}
