//! Where the hub is, where its files are kept, and who asks: the environment that all tools for the hub share.

use std::{
    env,
    path::{Path, PathBuf},
    time::Duration,
};

use super::error::HubError;
use crate::user_cache::named;

const ENDPOINT: &str = "https://huggingface.co";
/// How long a request may take to be answered, and a body to bring anything at all.
const ANSWER: Duration = Duration::from_secs(30);

/// A day, in seconds.
const LONGEST: u64 = 86_400;

/// The variables of <https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables>, resolved.
#[derive(Clone)]
pub struct Settings {
    /// `HF_ENDPOINT`, without a slash at its end.
    pub endpoint: String,
    /// `HF_HUB_CACHE`, else `HF_HOME/hub`, else `$XDG_CACHE_HOME/huggingface/hub`, else `~/.cache/huggingface/hub`.
    pub cache: PathBuf,
    /// `HF_TOKEN`, else what is in `HF_TOKEN_PATH`, else in `HF_HOME/token`.
    pub token: Option<String>,
    /// `HF_HUB_OFFLINE`: nothing is asked of any server.
    pub offline: bool,
    pub patience: Patience,
}

/// How long to wait for a server, and how often.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For an answer, and for bytes of a body to come.
    pub answer: Duration,
    /// Attempts in a row that bring nothing.
    pub attempts: u32,
    /// The wait before the second attempt; it doubles from there.
    pub first_wait: Duration,
    /// The longest wait between attempts, also of those that a server asks for.
    pub longest_wait: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience {
            answer: ANSWER,
            attempts: 10,
            first_wait: Duration::from_millis(500),
            longest_wait: Duration::from_secs(60),
        }
    }
}

impl Settings {
    /// What the environment says.
    ///
    /// # Errors
    /// Where it names no home, or a variable cannot be what it is.
    pub fn from_env() -> Result<Settings, HubError> {
        let home = home();
        let cache = ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"].into_iter().find_map(path);
        let cache = cache.or_else(|| Some(home.as_ref()?.join("hub"))).ok_or(HubError::NoHome)?;
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        if !endpoint.starts_with("https://") && !endpoint.starts_with("http://") {
            let problem = "an address that begins with https:// or http:// is expected";
            return Err(HubError::Setting { variable: "HF_ENDPOINT", value: endpoint, problem });
        }
        if endpoint.contains(['@', '?', '#']) {
            // It may be a secret, and is not told again.
            let (value, problem) = (
                "…".to_owned(),
                "an address without user, query and fragment is expected; a token goes into HF_TOKEN",
            );
            return Err(HubError::Setting { variable: "HF_ENDPOINT", value, problem });
        }
        let mut patience = Patience::default();
        if let Some(seconds) = text("HF_HUB_DOWNLOAD_TIMEOUT") {
            let parsed = seconds.parse().ok().filter(|seconds| (1..=LONGEST).contains(seconds));
            patience.answer = Duration::from_secs(parsed.ok_or(HubError::Setting {
                variable: "HF_HUB_DOWNLOAD_TIMEOUT",
                value: seconds,
                problem: "a whole number of seconds from 1 to 86400 is expected",
            })?);
        }
        let offline = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"].into_iter().any(is_true);
        // Relative paths would break the links between the cache's folders.
        let cache = std::path::absolute(&cache).map_err(HubError::io(&cache))?;
        Ok(Settings { endpoint, cache, token: token(home.as_deref()), offline, patience })
    }
}

fn home() -> Option<PathBuf> {
    if let Some(home) = path("HF_HOME") {
        return Some(home);
    }
    let cache = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")))?;
    Some(cache.join("huggingface"))
}

fn token(home: Option<&Path>) -> Option<String> {
    let given = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"].into_iter().find_map(text);
    if let Some(token) = given.filter(|token| is_token(token)) {
        return Some(token);
    }
    if is_true("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
        return None;
    }
    let file = path("HF_TOKEN_PATH").or_else(|| Some(home?.join("token")))?;
    let token = std::fs::read_to_string(file).ok()?;
    Some(token.trim().to_owned()).filter(|token| is_token(token))
}

fn text(variable: &str) -> Option<String> {
    let value = env::var(variable).ok()?;
    Some(value.trim().to_owned()).filter(|value| !value.is_empty())
}

/// A path whose `~` at the beginning is the user's home.
fn path(variable: &str) -> Option<PathBuf> {
    let value = named(variable)?;
    match value.strip_prefix("~") {
        Ok(rest) => Some(named("HOME")?.join(rest)),
        Err(_) => Some(value),
    }
}

fn is_true(variable: &str) -> bool {
    text(variable).is_some_and(|value| ["1", "ON", "YES", "TRUE"].contains(&&value.to_uppercase()[..]))
}

/// Anything else would break the header that it is sent in.
fn is_token(token: &str) -> bool {
    !token.is_empty() && token.chars().all(|c| c.is_ascii_graphic())
}
