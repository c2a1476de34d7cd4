//! `hapax sign`: signs a body as a sender would.

use std::path::PathBuf;

use hapax_core::Source;
use serde_json::{Value, json};

use super::captured::{self, SenderSecrets};
use super::output::{self, CommandFailure, Exit};

/// `hapax sign`.
#[derive(Debug, clap::Args)]
pub(super) struct Sign {
    /// The sender whose scheme to use; `hapax providers` lists them
    #[arg(long, value_name = "NAME")]
    provider: String,
    #[command(flatten)]
    identity: SenderSecrets,
    /// The time to sign with, in seconds since 1970 [default: now]
    #[arg(long, value_name = "UNIX", allow_negative_numbers = true)]
    now: Option<i64>,
    /// The request's method
    #[arg(long, value_name = "METHOD", default_value = "POST")]
    method: String,
    /// The full public URL, for senders that sign the URL
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// A header of the request, 'Name: value', for senders that sign headers; repeat it for each
    #[arg(long = "header", value_name = "LINE")]
    headers: Vec<String>,
    /// The event id, for senders that send it in a header [default: derived from body and time]
    #[arg(long, value_name = "ID")]
    id: Option<String>,
    /// The file with the exact body; - is standard input
    #[arg(long, value_name = "FILE")]
    body: PathBuf,
    /// Write the signed body to this file, for senders whose signature is inside the body
    #[arg(long, value_name = "FILE")]
    body_out: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Sign {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        let spec = self.identity.spec(&self.provider, self.url.is_some())?;
        let source = Source::build(spec).map_err(captured::cannot_build)?;
        let request = captured::arrival(
            captured::method(&self.method)?,
            self.url.as_deref(),
            captured::headers(&self.headers)?,
            captured::read(&self.body)?,
        );
        let now = captured::now(self.now)?;
        let signed = source.scheme().sign(&request, self.id.as_deref(), now).map_err(|error| {
            CommandFailure::usage(
                error.to_string(),
                "`hapax providers NAME` describes what the sender signs",
            )
        })?;
        match (&self.body_out, &signed.body) {
            (Some(path), changed) => {
                let body = changed.as_ref().unwrap_or(&request.body);
                std::fs::write(path, body).map_err(|error| {
                    CommandFailure::unreachable(format!("cannot write {}: {error}", path.display()))
                })?;
            }
            (None, Some(_)) => output::warning(
                "the signature of this sender is inside the body: write the signed body with --body-out FILE",
            ),
            (None, None) => {}
        }
        if let Some(url) = &signed.url {
            output::words(&format!("the signature of this sender is inside the URL: {url}"));
        }
        if self.json {
            let headers: Vec<Value> =
                signed.headers.iter().map(|(name, value)| json!([name, value])).collect();
            output::json(&json!({ "headers": headers, "url": signed.url.or(self.url) }))?;
        } else {
            for (name, value) in &signed.headers {
                output::data(&format!("{name}: {value}"))?;
            }
        }
        Ok(Exit::Done)
    }
}
