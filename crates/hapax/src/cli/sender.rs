//! The simulated sender of `send`, `storm` and `demo`, from flags: provider, secrets and endpoint.

use std::io::IsTerminal as _;
use std::path::Path;

use hapax_core::presets::{self, Preset};
use hapax_core::source::SourceSpec;
use hapax_storm::{Sender, StormError, StormErrorKind};
use indicatif::ProgressBar;

use super::captured::{self, SenderSecrets};
use super::output::{self, CommandFailure};
use crate::config;

/// Fewer requests than this get no progress bar.
const BAR_FROM: u64 = 50;

/// A sender like this provider, which signs with the secrets of `identity` and posts to `to`.
pub(super) fn sender_like(
    provider: &str,
    identity: &SenderSecrets,
    to: &str,
) -> Result<Sender, CommandFailure> {
    let preset = presets::find(provider).ok_or_else(|| {
        let hint = match presets::nearest(provider) {
            Some(near) => format!("did you mean \"{near}\"?"),
            None => "`hapax providers` lists all senders".to_owned(),
        };
        CommandFailure::usage(format!("unknown provider \"{}\"", output::shown(provider)), hint)
    })?;
    if !preset.can_sign() {
        return Err(CommandFailure::usage(
            format!("cannot sign events of {}", preset.title),
            "only the sender has the private key",
        ));
    }
    let uri = target("--to", to)?;
    let mut spec = identity.spec(preset.name, true)?;
    find_dev_secret(&mut spec, preset, &uri);
    Sender::new(preset, spec, to, uri).map_err(captured::cannot_build)
}

/// A progress bar, if stderr is a terminal and there are enough requests.
pub(super) fn bar(requests: u64) -> ProgressBar {
    let seen = std::io::stderr().is_terminal() && requests >= BAR_FROM;
    if seen { ProgressBar::new(requests) } else { ProgressBar::hidden() }
}

pub(super) fn target(flag: &str, text: &str) -> Result<http::Uri, CommandFailure> {
    let bad = || {
        CommandFailure::usage(
            format!("{flag} is not an http or https URL"),
            "write it as http://127.0.0.1:8080/webhooks/stripe",
        )
    };
    let uri: http::Uri = text.parse().map_err(|_| bad())?;
    let known_scheme = matches!(uri.scheme_str(), Some("http" | "https"));
    if known_scheme && uri.host().is_some() { Ok(uri) } else { Err(bad()) }
}

/// Uses the dev secret of the data dir if the endpoint is on loopback and no secret was given.
fn find_dev_secret(spec: &mut SourceSpec, preset: &Preset, uri: &http::Uri) {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let is_loopback = host == "localhost"
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    if !is_loopback || !spec.secrets.is_empty() {
        return;
    }
    let data_dir = std::env::var("HAPAX_DATA_DIR").unwrap_or_else(|_| "hapax-data".to_owned());
    if let Some(dev) = config::dev_secret(Path::new(&data_dir)) {
        captured::derive_from_dev(spec, preset, &dev);
    }
}

impl From<StormError> for CommandFailure {
    fn from(StormError { kind, message, hint }: StormError) -> Self {
        match kind {
            StormErrorKind::Arguments => Self::usage(message, hint),
            StormErrorKind::Unreachable => Self::unreachable(output::shown(&message)).hinted(&hint),
        }
    }
}
