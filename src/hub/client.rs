//! Questions to a hub, at the addresses that `hf-hub` knows. Its own client sends the token on to other ports of a host, and
//! cannot go on with a body: here each redirection is looked at, and all that a server says of a body.

use std::{io::Read, thread, time::Duration};

use hf_hub::{Repo, RepoType};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use ureq::{
    Agent, Body,
    http::{HeaderMap, Response, StatusCode, Uri, header},
};

use super::{
    Tell,
    digest::{ContentId, PIECE},
    error::HubError,
    listing::Listing,
    reference::RepoId,
    settings::{Patience, Settings},
    stop::Stop,
    transfer::check_range,
};
use crate::pipeline::event::Event;

/// Larger than any list of files.
const MAX_LISTING: u64 = 32 << 20;
/// Larger than any message that is shown.
const MAX_MESSAGE: u64 = 4 << 10;
const MAX_HOPS: usize = 8;
const AGENT: &str = concat!("viaduct/", env!("CARGO_PKG_VERSION"));
/// How often a wait looks whether it is to end.
const LOOK: Duration = Duration::from_millis(50);
/// What stands for itself in a path.
const PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'/').remove(b'-').remove(b'_').remove(b'.').remove(b'~');

pub(super) struct Client {
    agent: Agent,
    settings: Settings,
    endpoint: Uri,
}

/// Why one attempt brought nothing.
pub(super) enum Failure {
    /// Another attempt may bring more; the wait is what the server asks for.
    Passing { problem: String, wait: Option<Duration> },
    /// No other attempt will.
    Final(HubError),
}

impl Failure {
    pub(super) fn passing(problem: impl Into<String>) -> Failure {
        Failure::Passing { problem: problem.into(), wait: None }
    }
}

/// The beginning of an answer; its body is still to be read.
pub(super) struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// What the hub itself, not the host of its large files, names the content by.
    pub content: Option<String>,
    pub body: Body,
}

/// The attempts at one thing. Those that bring something begin the count anew.
pub(super) struct Attempts<'a> {
    patience: Patience,
    stop: &'a Stop<'a>,
    tell: Tell<'a>,
    what: &'a str,
    made: u32,
}

impl<'a> Attempts<'a> {
    pub(super) fn new(patience: Patience, stop: &'a Stop<'a>, tell: Tell<'a>, what: &'a str) -> Attempts<'a> {
        Attempts { patience, stop, tell, what, made: 0 }
    }

    pub(super) fn brought_something(&mut self) {
        self.made = 0;
    }

    /// Waits for the next attempt, or gives up.
    pub(super) fn failed(&mut self, failure: Failure) -> Result<(), HubError> {
        let (problem, asked) = match failure {
            Failure::Final(error) => return Err(error),
            Failure::Passing { problem, wait } => (problem, wait),
        };
        self.made += 1;
        let what = self.what.to_owned();
        let longest = self.patience.longest_wait;
        if let Some(wait) = asked.filter(|wait| *wait > longest || self.made >= self.patience.attempts) {
            return Err(HubError::RateLimited { what, problem, wait });
        }
        if self.made >= self.patience.attempts {
            return Err(HubError::Transfer { what, problem, attempts: self.made });
        }
        let doubled = self.patience.first_wait.saturating_mul(1 << (self.made - 1).min(16));
        let wait = asked.unwrap_or(doubled).min(longest);
        let seconds = wait.as_secs_f32();
        let attempts = self.patience.attempts;
        (self.tell)(Event::note(format!(
            "{what}: {problem}; trying again in {seconds:.1} s (attempt {} of {attempts})",
            self.made + 1
        )));
        pause(wait, self.stop)
    }
}

/// Sleeps, unless the work is to end.
pub(super) fn pause(time: Duration, stop: &Stop<'_>) -> Result<(), HubError> {
    let mut left = time;
    while !stop.is_asked() {
        if left.is_zero() {
            return Ok(());
        }
        let step = left.min(LOOK);
        thread::sleep(step);
        left -= step;
    }
    Err(HubError::Interrupted)
}

impl Client {
    pub(super) fn new(settings: &Settings) -> Result<Client, HubError> {
        let setting = |problem| HubError::Setting {
            variable: "HF_ENDPOINT",
            value: settings.endpoint.clone(),
            problem,
        };
        let endpoint: Uri = settings.endpoint.parse().map_err(|_| setting("this is no address"))?;
        let answer = settings.patience.answer;
        let agent = Agent::config_builder()
            .user_agent(AGENT)
            // Each hop is looked at here: what it says of the content, and who may see the token.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .timeout_resolve(Some(answer))
            .timeout_connect(Some(answer))
            .timeout_recv_response(Some(answer))
            .input_buffer_size(PIECE)
            .build()
            .into();
        Ok(Client { agent, settings: settings.clone(), endpoint })
    }

    fn repository(repo: &RepoId, revision: &str) -> Repo {
        Repo::with_revision(repo.id.clone(), RepoType::Model, revision.to_owned())
    }

    /// Where a file of a commit is.
    pub(super) fn address(&self, repo: &RepoId, commit: &str, file: &str) -> String {
        let repo = Client::repository(repo, commit);
        let (endpoint, file) = (&self.settings.endpoint, utf8_percent_encode(file, PATH));
        format!("{endpoint}/{}/resolve/{}/{file}", repo.url(), repo.url_revision())
    }

    /// The hub's description of a repository, as JSON.
    pub(super) fn describe(&self, repo: &RepoId) -> Result<Vec<u8>, Failure> {
        let path = Client::repository(repo, &repo.revision).api_url();
        let url = format!("{}/api/{path}?blobs=true", self.settings.endpoint);
        let answer = self.open(repo, "the list of files", &url, None, self.settings.patience.answer)?;
        if answer.status != StatusCode::OK {
            return Err(Failure::passing(format!("the server answered {}", answer.status)));
        }
        let mut json = Vec::new();
        let body = answer.body.into_reader();
        body.take(MAX_LISTING + 1).read_to_end(&mut json).map_err(|e| Failure::passing(e.to_string()))?;
        if json.len() as u64 > MAX_LISTING {
            let problem = format!("it has more than {MAX_LISTING} bytes");
            return Err(Failure::Final(HubError::Listing { repo: repo.clone(), problem }));
        }
        Ok(json)
    }

    /// Asks for a file, which is at that address, from a byte on. Of a body that is read for longer than `limit`, the rest does not come.
    pub(super) fn open(
        &self,
        repo: &RepoId,
        file: &str,
        url: &str,
        range: Option<&str>,
        limit: Duration,
    ) -> Result<Answer, Failure> {
        let (mut uri, mut content) = (parse(url)?, None);
        for hop in 0..MAX_HOPS {
            let mut request = self.agent.get(&uri).header(header::ACCEPT_ENCODING, "identity");
            if let Some(token) = self.settings.token.as_ref().filter(|_| same_host(&uri, &self.endpoint)) {
                request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
            }
            if let Some(range) = range {
                request = request.header(header::RANGE, range);
            }
            let request = request.config().timeout_recv_body(Some(limit)).build();
            let response = request.call().map_err(|e| self.unreachable(&uri, &e))?;
            if hop == 0 {
                content = content_of(response.headers());
            }
            let status = response.status();
            if status.is_redirection() {
                uri = next_hop(&uri, response.headers())?;
            } else if status.is_success() || status == StatusCode::RANGE_NOT_SATISFIABLE {
                let (parts, body) = response.into_parts();
                return Ok(Answer { status, headers: parts.headers, content, body });
            } else {
                let what = format!("{repo}: {file}");
                let ours = same_host(&uri, &self.endpoint);
                return Err(self.refusal(repo, &what, status, response, ours));
            }
        }
        Err(Failure::passing(format!("more than {MAX_HOPS} redirections")))
    }

    /// The first bytes of a file.
    pub(super) fn beginning(&self, listing: &Listing, name: &str, bytes: u64) -> Result<Vec<u8>, Failure> {
        let Listing { repo, commit, files, .. } = listing;
        let url = self.address(repo, commit, name);
        let range = format!("bytes=0-{}", bytes.saturating_sub(1));
        let answer = self.open(repo, name, &url, Some(&range), self.settings.patience.answer)?;
        let id = files.get(name).map(|file| file.id.as_str());
        if answer.content.as_deref().zip(id).is_some_and(|(content, id)| content != id) {
            return Err(Failure::passing(format!("{name}: the hub names another content than before")));
        }
        match (answer.status, files.get(name)) {
            (StatusCode::PARTIAL_CONTENT, Some(file)) => check_range(&answer.headers, 0, file.bytes)?,
            (StatusCode::OK, _) => {}
            (status, _) => return Err(Failure::passing(format!("the server answered {status}"))),
        }
        let mut read = Vec::new();
        let body = answer.body.into_reader();
        body.take(bytes).read_to_end(&mut read).map_err(|e| Failure::passing(e.to_string()))?;
        match read.len() as u64 == bytes {
            true => Ok(read),
            false => Err(Failure::passing(format!("{name}: it ends after {} bytes", read.len()))),
        }
    }

    fn unreachable(&self, uri: &Uri, error: &ureq::Error) -> Failure {
        let problem = match error {
            ureq::Error::Timeout(_) => format!("no answer in {} s", self.settings.patience.answer.as_secs()),
            other => other.to_string(),
        };
        // Not its user and query, which may be secrets.
        let host =
            uri.authority().map_or("", |authority| authority.as_str().rsplit('@').next().unwrap_or(""));
        Failure::passing(format!("{}://{host}: {problem}", uri.scheme_str().unwrap_or_default()))
    }

    /// What a status that is no success means. `ours` says that the hub itself answered.
    fn refusal(
        &self,
        repo: &RepoId,
        what: &str,
        status: StatusCode,
        answer: Response<Body>,
        ours: bool,
    ) -> Failure {
        let header = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok());
        let seconds = || header("retry-after")?.trim().parse().ok();
        let wait = || seconds().or_else(|| until_reset(header("ratelimit")?)).map(Duration::from_secs);
        let (repo, endpoint) = (repo.clone(), self.settings.endpoint.clone());
        let error = match (status.as_u16(), header("x-error-code")) {
            (429, _) => {
                return Failure::Passing { problem: "too many requests".to_owned(), wait: wait() };
            }
            (408 | 425 | 500..=599, _) => {
                return Failure::Passing { problem: format!("the server answered {status}"), wait: wait() };
            }
            // The address that the hub gave has expired; it will give another one.
            (401 | 403, _) if !ours => {
                return Failure::passing(format!("the host of the file answered {status}"));
            }
            (_, Some("GatedRepo")) => HubError::Gated { repo, endpoint },
            (_, Some("RevisionNotFound")) => HubError::NoRevision { repo },
            (_, Some("RepoNotFound")) => HubError::NoRepository { repo, endpoint },
            (401 | 403, None) if self.settings.token.is_some() => HubError::Unauthorized { repo },
            (401 | 403, None) => HubError::NoRepository { repo, endpoint },
            _ => {
                let message = header("x-error-message").map(str::to_owned);
                let message = message.unwrap_or_else(|| text(answer.into_body()));
                HubError::Status { what: what.to_owned(), status: status.as_u16(), message }
            }
        };
        Failure::Final(error)
    }
}

/// The seconds of `"api";r=0;t=55`, the hub's word for that many until it takes requests again.
fn until_reset(limit: &str) -> Option<u64> {
    let mut parameters = limit.split(';').filter_map(|parameter| parameter.trim().split_once('='));
    parameters.find(|(name, _)| *name == "t")?.1.parse().ok()
}

/// The beginning of a body that is to be read by people.
fn text(body: Body) -> String {
    let mut bytes = Vec::new();
    // A message that does not come is no reason for another error.
    let _ = body.into_reader().take(MAX_MESSAGE).read_to_end(&mut bytes);
    let text = String::from_utf8_lossy(&bytes).trim().to_owned();
    if text.starts_with('<') { String::new() } else { text }
}

fn parse(url: &str) -> Result<Uri, Failure> {
    url.parse().map_err(|_| Failure::passing(format!("{url:?} is no address")))
}

fn same_host(a: &Uri, b: &Uri) -> bool {
    a.scheme() == b.scheme() && a.authority() == b.authority()
}

fn content_of(headers: &HeaderMap) -> Option<String> {
    let tag = ["x-linked-etag", "etag"].into_iter().find_map(|name| headers.get(name))?.to_str().ok()?;
    let tag = tag.trim_start_matches("W/").trim_matches('"');
    // A mirror may have tags of another kind.
    ContentId::is_one(tag).then(|| tag.to_owned())
}

/// Where an answer sends on to; never from a secret channel to an open one.
fn next_hop(from: &Uri, headers: &HeaderMap) -> Result<Uri, Failure> {
    let location = headers.get(header::LOCATION).and_then(|value| value.to_str().ok());
    let location = location.ok_or_else(|| Failure::passing("a redirection to nowhere"))?;
    if location.starts_with('/') && !location.starts_with("//") {
        let mut parts = from.clone().into_parts();
        parts.path_and_query = location.parse().ok();
        return Uri::from_parts(parts)
            .map_err(|_| Failure::passing(format!("a redirection to {location:?}")));
    }
    let next = parse(location)?;
    match (from.scheme_str(), next.scheme_str()) {
        (_, Some("https")) | (Some("http"), Some("http")) => Ok(next),
        _ => Err(Failure::passing(format!("a redirection to {location:?}"))),
    }
}
