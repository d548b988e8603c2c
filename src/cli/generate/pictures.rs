//! Which pictures a command asks for, and where they go.

use std::path::{Path, PathBuf};

use anyhow::Context;

use super::Arguments;
use crate::{
    cli::exit::UsageError,
    npy,
    pipeline::{
        image::check_finite,
        text_to_image::{Negative, Noise, Request, TextToImage},
    },
};

/// One request per picture: each prompt with as many seeds as are asked for, counting from the first.
pub fn requests(arguments: &Arguments, pipeline: &TextToImage<'_>) -> anyhow::Result<Vec<Request>> {
    let family = pipeline.family();
    let [width, height] = arguments.size.asked();
    let own = family.default_size();
    let size = family.size(width.unwrap_or(own[0]), height.unwrap_or(own[1]))?;
    let steps = family.steps(arguments.num_steps);
    if !(1..=1000).contains(&steps) {
        return Err(UsageError(format!("--num-steps {steps}: a picture takes 1 to 1000")).into());
    }
    let noises = noises(arguments)?;
    let negative = negative(arguments)?;
    let pairs = arguments.prompt.iter().flat_map(|prompt| noises.iter().map(move |noise| (prompt, noise)));
    let request = |(prompt, noise): (&String, &Noise)| Request {
        prompt: prompt.clone(),
        negative: negative.clone(),
        size,
        steps,
        noise: noise.clone(),
    };
    let requests: Vec<_> = pairs.map(request).collect();
    requests.iter().try_for_each(|request| pipeline.check(request))?;
    Ok(requests)
}

fn negative(arguments: &Arguments) -> Result<Option<Negative>, UsageError> {
    let Some(prompt) = arguments.negative.clone() else { return Ok(None) };
    let scale = arguments.guidance;
    match scale.is_finite() && scale > 1.0 {
        true => Ok(Some(Negative { prompt, scale })),
        false => Err(UsageError(format!(
            "--guidance {scale}: a number above 1 moves away from the negative prompt"
        ))),
    }
}

fn noises(arguments: &Arguments) -> anyhow::Result<Vec<Noise>> {
    if let Some(path) = &arguments.noise {
        let noise = npy::read(path).context("--noise")?;
        check_finite(&format!("--noise {}", path.display()), None, &noise)?;
        return Ok(vec![Noise::Given(noise)]);
    }
    let (first, count) = (arguments.seed.unwrap_or_else(random_seed), u64::from(arguments.count));
    let last = first.checked_add(count - 1);
    let last =
        last.ok_or_else(|| UsageError(format!("--seed {first} --count {count}: seeds end at {}", u64::MAX)))?;
    Ok((first..=last).map(Noise::Seed).collect())
}

/// A seed that fits every program that reads it: 32 bits.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()) & 0xFFFF_FFFF
}

/// The pictures' files: `out.png`, or `out-1.png`, `out-2.png` and so on where there is more than one.
pub fn files(out: &Path, count: usize) -> Vec<PathBuf> {
    if count == 1 {
        return vec![out.to_owned()];
    }
    let numbered = |number: usize| {
        let mut name = out.file_stem().unwrap_or_default().to_owned();
        name.push(format!("-{number}"));
        if let Some(extension) = out.extension() {
            name.push(".");
            name.push(extension);
        }
        out.with_file_name(name)
    };
    (1..=count).map(numbered).collect()
}

/// Refuses before the work what could not be written after it.
pub fn check_writable(arguments: &Arguments, files: &[PathBuf]) -> anyhow::Result<()> {
    let out = &arguments.out;
    if out.is_dir() {
        return Err(UsageError(format!("-o {}: that is a folder; name a .png file", out.display())).into());
    }
    if out.extension().is_some_and(|e| !e.eq_ignore_ascii_case("png")) {
        let message = format!("-o {}: pictures are written as PNG; name a .png file", out.display());
        return Err(UsageError(message).into());
    }
    if out.as_os_str().as_encoded_bytes().ends_with(b"/") || out.file_name().is_none() {
        return Err(UsageError(format!("-o {}: name a .png file", out.display())).into());
    }
    let existing = files.iter().find(|file| file.symlink_metadata().is_ok() && !arguments.force);
    if let Some(file) = existing {
        let message = format!("{} exists; choose another -o or pass --force to replace it", file.display());
        return Err(UsageError(message).into());
    }
    // Folders that are missing are made when there is something to put into them.
    let there = folder_of(out).ancestors().find(|p| p.exists()).unwrap_or(Path::new("."));
    tempfile::tempfile_in(there).with_context(|| format!("cannot write into {}", there.display()))?;
    Ok(())
}

pub fn folder_of(out: &Path) -> &Path {
    out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_pictures_are_numbered() {
        let names = |out: &str, count| {
            let files = files(Path::new(out), count);
            files.iter().map(|file| file.to_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(names("a/fox.png", 1), ["a/fox.png"]);
        assert_eq!(names("a/fox.png", 2), ["a/fox-1.png", "a/fox-2.png"]);
        assert_eq!(names("fox", 2), ["fox-1", "fox-2"]);
        assert_eq!(names("v1.2.PNG", 2), ["v1.2-1.PNG", "v1.2-2.PNG"]);
    }
}
