//! The pages of duplicates, Idempotency-Keys and storage.

use std::collections::HashMap;
use std::sync::Arc;

use askama::Template;
use axum::extract::State;
use axum::{Extension, Json};
use hapax_core::Timestamp;
use hapax_core::presets::RetrySchedule;

use super::super::extract::{JsonBody, QueryParams};
use super::super::problem::Problem;
use super::super::{Admin, AdminStore, events, stats, storage as api_storage};
use super::actions::{ActionForm, ActionRequest, ActionResult, PageAction, Question};
use super::filters::Filters;
use super::{Frame, Page, PageReader};
use crate::api::{
    DeleteKeyRequest, EventSummary, EventsQuery, Figures, Key, KeysQuery, StatsQuery, Storage,
};

#[derive(Template)]
#[template(path = "duplicates.html")]
pub(in crate::admin) struct Duplicates {
    frame: Frame,
    window: String,
    sources: Vec<(String, Figures)>,
    /// The retry schedules that the senders document.
    schedules: Arc<HashMap<String, RetrySchedule>>,
    /// Events that arrived more than once.
    items: Vec<EventSummary>,
    older: Option<String>,
    searched_to: Option<Timestamp>,
    is_first: bool,
}

/// `GET /duplicates`.
pub(in crate::admin) async fn duplicates<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    filters: Filters,
) -> Result<Page<Duplicates>, Problem> {
    let frame = reader.frame(&admin, "/duplicates").await;
    let window = filters.get("window").unwrap_or_else(|| "24h".to_owned());
    let QueryParams(query) = Filters::default().with("window", &window).query::<StatsQuery>()?;
    let stats = stats::counted(&admin, &query).await?;
    let cursor = filters.get("cursor");
    let query = EventsQuery { copied: true, cursor: cursor.clone(), ..EventsQuery::default() };
    let caller = Extension(reader.caller()?);
    let schedules = admin.retry_schedules.load_full();
    let Json(events) = events::list(State(admin), caller, QueryParams(query)).await?;
    let mut sources: Vec<_> = stats.sources.into_iter().flatten().collect();
    sources.sort_by(|(a, x), (b, y)| (y.duplicates, a).cmp(&(x.duplicates, b)));
    let page = Duplicates {
        older: filters.older(&frame.base, "/duplicates", events.next.as_deref()),
        frame,
        window,
        sources,
        schedules,
        items: events.items,
        searched_to: events.searched_to,
        is_first: cursor.is_none(),
    };
    Ok(reader.page(page))
}

#[derive(Template)]
#[template(path = "keys.html")]
pub(in crate::admin) struct Keys {
    frame: Frame,
    scope: Option<String>,
    key: Option<String>,
    items: Vec<(String, Key)>,
    older: Option<String>,
    is_first: bool,
    done: Option<String>,
}

/// `GET /keys`.
pub(in crate::admin) async fn keys<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
    filters: Filters,
) -> Result<Page<Keys>, Problem> {
    let frame = reader.frame(&admin, "/keys").await;
    let done = filters.done();
    let filters = filters.only(&["scope", "key", "cursor", "limit"]);
    let query = filters.query::<KeysQuery>()?;
    let Json(page) = api_storage::keys(State(admin), query).await?;
    let named = |key: Key| (api_storage::name_of(&key.scope, &key.key), key);
    let page = Keys {
        older: filters.older(&frame.base, "/keys", page.next.as_deref()),
        frame,
        scope: filters.get("scope"),
        key: filters.get("key"),
        items: page.items.into_iter().map(named).collect(),
        is_first: filters.get("cursor").is_none(),
        done,
    };
    Ok(reader.page(page))
}

/// Deletes an Idempotency-Key.
pub(in crate::admin) struct DeleteKey;

impl<S: AdminStore> PageAction<S> for DeleteKey {
    async fn question(ActionRequest { id, .. }: ActionRequest<S>) -> Result<Question, Problem> {
        let name = api_storage::position(&id).ok_or_else(unknown)?;
        Ok(Question {
            title: "Delete this Idempotency-Key?".to_owned(),
            subject: format!("{} in {}", name.key, name.scope),
            sentences: vec![
                "The stored answer is lost, and the next request with this key runs: its effects happen \
                 again if the first request had any."
                    .to_owned(),
                "A key that a request runs under now cannot be deleted.".to_owned(),
            ],
            button: "Delete",
            needs_reason: true,
            is_final: true,
            back: "/keys".to_owned(),
            ..Question::default()
        })
    }

    async fn act(
        ActionRequest { admin, caller, id, .. }: ActionRequest<S>,
        form: &ActionForm,
    ) -> Result<ActionResult, Problem> {
        let name = api_storage::position(&id).ok_or_else(unknown)?;
        let reason = form.reason.clone().unwrap_or_default();
        let asked = DeleteKeyRequest { scope: name.scope, key: name.key, reason };
        let deleted = api_storage::delete_key(State(admin), Extension(caller), JsonBody(asked));
        let Json(_) = deleted.await?;
        let sentence = "The key is deleted.".to_owned();
        Ok(ActionResult { page: "/keys".to_owned(), sentence, ..ActionResult::default() })
    }
}

fn unknown() -> Problem {
    Problem::not_found("no such key is stored")
}

#[derive(Template)]
#[template(path = "storage.html")]
pub(in crate::admin) struct StoragePage {
    frame: Frame,
    storage: Storage,
}

/// `GET /storage`.
pub(in crate::admin) async fn storage<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    reader: PageReader,
) -> Result<Page<StoragePage>, Problem> {
    let frame = reader.frame(&admin, "/storage").await;
    let Json(storage) = api_storage::storage(State(admin)).await?;
    Ok(reader.page(StoragePage { frame, storage }))
}
