//! `hapax explain`: the history of one event in plain sentences. The sentences answer a customer's question
//! "what happened to my payment?".

use hapax_core::Timestamp;
use serde_json::json;

use super::admin_client::{self, Remote, encoded};
use super::events::read;
use super::output::{self, CommandFailure, Exit};
use crate::api::{Event, EventSummary};
use crate::story::story;

/// `hapax explain`.
#[derive(Debug, clap::Args)]
pub(super) struct Explain {
    /// The event's id in Hapax, or the sender's event id
    id: String,
    #[command(flatten)]
    remote: Remote,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Explain {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        admin_client::run(self.explain())
    }

    async fn explain(self) -> Result<Exit, CommandFailure> {
        let server = self.remote.open()?;
        let event: Event =
            read(server.get(&format!("/api/v1/events/{}", encoded(&self.id))).await?)?;
        let story = story(&event, Timestamp::now());
        if self.json {
            let EventSummary { id, event_id, status, .. } = &event.summary;
            output::json(
                &json!({ "id": id, "event_id": event_id, "status": status, "story": story }),
            )?;
            return Ok(Exit::Done);
        }
        for sentence in story {
            output::data(&output::shown(&sentence))?;
        }
        Ok(Exit::Done)
    }
}
