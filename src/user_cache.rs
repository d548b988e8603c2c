//! The user's cache folder, where kept runs and what was measured of devices lie.

use std::{env, path::PathBuf};

/// `$XDG_CACHE_HOME/viaduct`, else `~/.cache/viaduct`; none where the environment names no home. A relative
/// `$XDG_CACHE_HOME` counts as unset, says the XDG base directory specification.
pub fn user_cache() -> Option<PathBuf> {
    let cache = named("XDG_CACHE_HOME").filter(|path| path.is_absolute());
    let cache = cache.or_else(|| Some(named("HOME")?.join(".cache")))?;
    Some(cache.join("viaduct"))
}

/// The path that an environment variable holds, unless it is empty.
pub fn named(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
}
