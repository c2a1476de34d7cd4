//! The search for a text of `q`. The search finds events with the text as an id, events with the text as a
//! value that their source names in `search`, and events whose id or body contains the text. A caller who
//! must not see redacted values searches without them.

use hapax_core::delivery::DeliveryId;
use hapax_core::job::JobId;
use hapax_core::store::{EventId, EventName, Lookup, TextSearch};
use uuid::Uuid;

use super::auth::Caller;
use super::problem::Problem;
use super::{Admin, AdminStore};

/// The search for a text; `None` if it is empty.
pub(super) async fn text_search<S: AdminStore>(
    admin: &Admin<S>,
    caller: &Caller,
    text: Option<String>,
) -> Result<Option<TextSearch>, Problem> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(None) };
    let sees_all = caller.sees_payloads();
    let fields = admin.search_fields.load();
    let values =
        fields.hashes(&text, |source, field| sees_all || admin.redactions.shows(source, field));
    let sources = (!sees_all).then(|| admin.redactions.searchable());
    let named = named(admin, &text).await?;
    Ok(Some(TextSearch { text, named, values, sources }))
}

/// The events that an id names. The id may be that of the event (Hapax's or the sender's), of a job, of a request, of a
/// message that a handler published, or of a delivery of such a message.
pub(super) async fn named<S: AdminStore>(
    admin: &Admin<S>,
    text: &str,
) -> Result<Vec<EventId>, Problem> {
    let store = &admin.store;
    let mut found = Vec::new();
    let mut add = |lookup| match lookup {
        Lookup::None => {}
        Lookup::One(event) => found.push(event),
        Lookup::Ambiguous(events) => found.extend(events),
    };
    add(ids(store.event(&EventName::Theirs(text.into())).await?));
    if let Ok(id) = text.parse::<Uuid>() {
        add(ids(store.event(&EventName::Ours(EventId(id))).await?));
        if let Some(job) = store.job(JobId(id)).await? {
            found.push(job.event);
        }
        if let Some(delivery) = store.delivery(DeliveryId(id)).await? {
            found.extend(store.events_traced_by(&delivery.message).await?);
        }
    }
    found.extend(store.events_traced_by(text).await?);
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

fn ids(found: Lookup<hapax_core::store::EventDetail>) -> Lookup<EventId> {
    match found {
        Lookup::None => Lookup::None,
        Lookup::One(event) => Lookup::One(event.summary.id),
        Lookup::Ambiguous(events) => Lookup::Ambiguous(events),
    }
}
