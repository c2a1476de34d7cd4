//! `hapax rejections`: the last requests of a source that were refused.

use serde_json::Value;

use super::admin_client::{self, Remote, encoded};
use super::events::read;
use super::lists::{Words, print_page};
use super::output::{CommandFailure, Exit};
use crate::api::Rejection;
use crate::format;

/// `hapax rejections`.
#[derive(Debug, clap::Args)]
pub(super) struct Rejections {
    /// The source
    source: String,
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

impl Rejections {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        admin_client::run(self.list())
    }

    async fn list(self) -> Result<Exit, CommandFailure> {
        let server = self.remote.open()?;
        let path = format!("/api/v1/sources/{}/rejections", encoded(&self.source));
        let page = read(server.get(&path).await?)?;
        let words = Words { items: "rejections", empty: "no request to this source was refused" };
        print_page(page, self.json, words, line_of)
    }
}

/// A refused request as the list prints it.
fn line_of(rejection: Value) -> Result<String, CommandFailure> {
    let rejection: Rejection = read(rejection)?;
    let detail = rejection.detail.map(|detail| format!(": {detail}")).unwrap_or_default();
    let claimed = rejection.claimed_id.map(|id| format!("  claims {id}")).unwrap_or_default();
    Ok(format!(
        "{}  {}  {}{detail}{claimed}  request {}",
        format::at(rejection.at),
        rejection.remote.map_or_else(|| "-".to_owned(), |remote| remote.to_string()),
        rejection.reason,
        rejection.request_id,
    ))
}
