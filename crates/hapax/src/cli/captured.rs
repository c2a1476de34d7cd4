//! Arguments that `verify`, `sign` and `send` share: a captured request, and the secrets and parameters
//! that verify or sign it.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use hapax_core::presets::{self, Preset};
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::{SourceError, SourceSpec};
use hapax_core::{Arrival, Timestamp};
use http::header::{HeaderMap, HeaderName, HeaderValue};

use super::output::CommandFailure;
use crate::{config, signing};

/// The secrets and parameters of a sender.
#[derive(Debug, clap::Args)]
pub(super) struct SenderSecrets {
    /// The secret, or env:NAME or file:PATH; repeat it during a rotation [env: HAPAX_SECRET]
    #[arg(long = "secret", value_name = "SECRET")]
    pub(super) secrets: Vec<String>,
    /// A file that contains the secret. From the dev secret of a server in dev mode, the secret of each
    /// sender is derived
    #[arg(long, value_name = "FILE")]
    pub(super) secret_file: Option<PathBuf>,
    /// A parameter that some schemes need besides the secret: webhook_id=ID, cert_pem=file:PATH
    #[arg(long = "param", value_name = "KEY=VALUE")]
    pub(super) params: Vec<String>,
}

impl SenderSecrets {
    /// Every secret, those of --secret before --secret-file; HAPAX_SECRET is used only without both.
    pub(super) fn secrets(&self) -> Result<Vec<Secret>, CommandFailure> {
        let mut given = self.secrets.clone();
        given.extend(self.secret_file.iter().map(|path| format!("file:{}", path.display())));
        let resolve = |text: &String| {
            config::resolve_secret(text, &env).map(|resolved| resolved.secret).map_err(|invalid| {
                CommandFailure::usage(format!("the secret {}", invalid.problem), invalid.hint)
            })
        };
        if given.is_empty() {
            return Ok(env("HAPAX_SECRET").map(Secret::new).into_iter().collect());
        }
        given.iter().map(resolve).collect()
    }

    /// The parameters, with `env:` and `file:` resolved.
    pub(super) fn params(&self) -> Result<BTreeMap<String, String>, CommandFailure> {
        let param = |text: &String| {
            let (key, value) = text.split_once('=').ok_or_else(|| {
                CommandFailure::usage(
                    "--param is not KEY=VALUE",
                    "write it as --param webhook_id=8PT597110X687430L",
                )
            })?;
            let resolved = config::resolve_secret(value, &env).map_err(|invalid| {
                CommandFailure::usage(format!("--param {key} {}", invalid.problem), invalid.hint)
            })?;
            Ok((key.to_owned(), resolved.secret.expose().to_owned()))
        };
        self.params.iter().map(param).collect()
    }

    /// The spec of a source with this provider, these secrets and parameters.
    pub(super) fn spec(
        &self,
        provider: &str,
        url_known: bool,
    ) -> Result<SourceSpec, CommandFailure> {
        let secrets = self.secrets()?.into_iter().map(ActiveSecret::forever).collect();
        let mut spec = SourceSpec::new(provider, provider, secrets);
        spec.params = self.params()?;
        spec.url_known = url_known;
        if let Some(preset) = presets::find(provider) {
            let dev = spec.secrets.iter().map(|active| active.secret.clone()).next();
            if let Some(dev) = dev.filter(config::is_dev_secret) {
                derive_from_dev(&mut spec, preset, &dev);
            }
        }
        Ok(spec)
    }
}

/// Sets the secret and the parameters that `preset` has in dev mode.
pub(super) fn derive_from_dev(spec: &mut SourceSpec, preset: &Preset, dev: &Secret) {
    let Some(own) = signing::dev_secret(preset, dev.expose()) else { return };
    spec.secrets = vec![ActiveSecret::forever(own)];
    for (key, value) in signing::dev_params(preset, dev.expose()) {
        spec.params.entry(key).or_insert(value);
    }
}

fn env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

/// Turns an error about a source into a hint about command-line flags.
pub(super) fn cannot_build(error: SourceError) -> CommandFailure {
    let SourceError { field, problem, hint } = error;
    let flag = match field.split('.').next().unwrap_or(field) {
        "provider" => "pass --provider NAME",
        "secrets" => "pass it with --secret, --secret-file or HAPAX_SECRET",
        "params" => "pass it with --param KEY=VALUE",
        "public_url" => "pass the full public URL with --url",
        _other => "",
    };
    match (flag, hint.is_empty()) {
        ("", _) | (_, true) => {
            CommandFailure::usage(problem, if hint.is_empty() { flag.to_owned() } else { hint })
        }
        (flag, false) => CommandFailure::usage(problem, format!("{hint}; {flag}")),
    }
}

/// Reads a file, or standard input for `-`.
pub(super) fn read(path: &Path) -> Result<Bytes, CommandFailure> {
    let read = if path == Path::new("-") {
        let mut bytes = Vec::new();
        std::io::stdin().lock().read_to_end(&mut bytes).map(|_| bytes)
    } else {
        std::fs::read(path)
    };
    read.map(Bytes::from).map_err(|error| {
        CommandFailure::unreachable(format!("cannot read {}: {error}", path.display()))
    })
}

/// The time of `--now`, or of the clock.
pub(super) fn now(unix_seconds: Option<i64>) -> Result<Timestamp, CommandFailure> {
    match unix_seconds {
        None => Ok(Timestamp::now()),
        Some(seconds) => Timestamp::from_second(seconds).map_err(|_| {
            CommandFailure::usage(
                "--now is out of range",
                "write seconds since 1970, such as 1767225600",
            )
        }),
    }
}

/// Parses `'Name: value'` lines; as in HTTP, whitespace around the value is dropped.
pub(super) fn headers(lines: &[String]) -> Result<HeaderMap, CommandFailure> {
    let mut headers = HeaderMap::new();
    for line in lines {
        let bad = || {
            CommandFailure::usage(
                "--header is not 'Name: value'",
                "write it as --header 'Name: value', quoted for the shell",
            )
        };
        let (name, value) = line.split_once(':').ok_or_else(bad)?;
        let (name, value) = header(name.trim(), value.trim()).ok_or_else(bad)?;
        headers.append(name, value);
    }
    Ok(headers)
}

/// Parses one header; `None` if it is not valid in HTTP.
pub(super) fn header(name: &str, value: &str) -> Option<(HeaderName, HeaderValue)> {
    let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
    Some((name, HeaderValue::from_bytes(value.as_bytes()).ok()?))
}

/// Parses the method, in any case.
pub(super) fn method(text: &str) -> Result<http::Method, CommandFailure> {
    http::Method::from_bytes(text.to_ascii_uppercase().as_bytes())
        .map_err(|_| CommandFailure::usage("--method is not an HTTP method", "POST is the default"))
}

/// Builds the request.
pub(super) fn arrival(
    method: http::Method,
    url: Option<&str>,
    headers: HeaderMap,
    body: Bytes,
) -> Arrival {
    Arrival { method, url: url.unwrap_or_default().to_owned(), headers, body }
}
