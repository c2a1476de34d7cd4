//! `hapax sign`: the headers that a sender would sign a body with.

use std::path::PathBuf;

use hapax_core::Source;
use serde_json::{Value, json};

use super::captured::{self, Identity};
use super::output::{self, Exit, Failure};

/// `hapax sign`.
#[derive(Debug, clap::Args)]
pub(super) struct Sign {
    /// Whose scheme: `hapax providers` lists them
    #[arg(long, value_name = "NAME")]
    provider: String,
    #[command(flatten)]
    identity: Identity,
    /// Sign as if it were then, in seconds since 1970 [default: the clock]
    #[arg(long, value_name = "UNIX", allow_negative_numbers = true)]
    now: Option<i64>,
    /// The request's method
    #[arg(long, value_name = "METHOD", default_value = "POST")]
    method: String,
    /// The full public URL, for senders that sign it
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// A header that the request has already, 'Name: value', for senders that sign it
    #[arg(long = "header", value_name = "LINE")]
    headers: Vec<String>,
    /// The event id, for senders that put it in a header [default: one made of body and time]
    #[arg(long, value_name = "ID")]
    id: Option<String>,
    /// The body, byte for byte; - is standard input
    #[arg(long, value_name = "FILE")]
    body: PathBuf,
    /// Where to write the body, for senders that sign inside it
    #[arg(long, value_name = "FILE")]
    body_out: Option<PathBuf>,
    /// Print one JSON object instead of lines
    #[arg(long)]
    json: bool,
}

impl Sign {
    pub(super) fn run(self) -> Result<Exit, Failure> {
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
            Failure::usage(error.to_string(), "`hapax providers NAME` says what can be signed")
        })?;
        match (&self.body_out, &signed.body) {
            (Some(path), changed) => {
                let body = changed.as_ref().unwrap_or(&request.body);
                std::fs::write(path, body).map_err(|error| {
                    Failure::unreachable(format!("cannot write {}: {error}", path.display()))
                })?;
            }
            (None, Some(_)) => output::warning(
                "this sender signs inside the body: get the signed one with --body-out FILE",
            ),
            (None, None) => {}
        }
        if let Some(url) = &signed.url {
            output::words(&format!("this sender signs inside the URL: {url}"));
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
