//! Routes for the disk space of the database, and for the Idempotency-Keys in it.

use std::sync::Arc;

use axum::extract::State;
use axum::{Extension, Json};
use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine as _};
use hapax_core::store::{AuditEntry, KeyDeleted, KeyFilter, KeyPosition, KeyRecord};

use super::auth::Caller;
use super::extract::{self, JsonBody, QueryParams};
use super::problem::Problem;
use super::{Admin, AdminStore};
use crate::api::{DeleteKeyRequest, DeletedKey, Key, KeysQuery, List, Storage};

/// The prefix of the names of Hapax's own APIs. The Idempotency-Keys of these APIs are the ids of the forms
/// that pages have sent. The colon keeps these names apart from the names of proxies.
pub(super) const OWN_REALMS: &str = "hapax:";

/// The most pages of keys that are read to find a key that is not a form of the dashboard.
const FORM_PAGES_MAX: usize = 10;

/// `GET /api/v1/storage`.
pub(super) async fn storage<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
) -> Result<Json<Storage>, Problem> {
    Ok(Json(admin.store.storage().await?.into()))
}

/// `GET /api/v1/keys`: the keys of all proxies and APIs, without those of Hapax's own pages. The keys of the
/// pages are listed only if `scope` names them.
pub(super) async fn keys<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    QueryParams(query): QueryParams<KeysQuery>,
) -> Result<Json<List<Key>>, Problem> {
    let after = query.cursor.map(|cursor| {
        let bad = "cursor is not valid: pass `next` of the previous page";
        position(&cursor).ok_or_else(|| Problem::bad_request(bad))
    });
    let mut filter = KeyFilter {
        scope: query.scope.filter(|scope| !scope.is_empty()),
        key: query.key.filter(|key| !key.is_empty()),
        after: after.transpose()?,
        limit: extract::limit(query.limit)?,
    };
    let asks_for_forms = filter.scope.as_ref().is_some_and(|scope| scope.starts_with(OWN_REALMS));
    let is_form = |record: &KeyRecord| record.scope.starts_with(OWN_REALMS) && !asks_for_forms;
    let mut page = admin.store.keys(filter.clone()).await?;
    page.items.retain(|record| !is_form(record));
    for _ in 1..FORM_PAGES_MAX {
        if !page.items.is_empty() || page.next.is_none() {
            break;
        }
        filter.after = page.next;
        page = admin.store.keys(filter.clone()).await?;
        page.items.retain(|record| !is_form(record));
    }
    let now = (admin.now)();
    Ok(Json(List {
        items: page.items.into_iter().map(|record| Key::at(now, record)).collect(),
        next: page.next.map(|at| name_of(&at.scope, &at.key)),
        searched_to: None,
    }))
}

/// `DELETE /api/v1/keys`.
pub(super) async fn delete_key<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    Extension(caller): Extension<Caller>,
    JsonBody(asked): JsonBody<DeleteKeyRequest>,
) -> Result<Json<DeletedKey>, Problem> {
    let DeleteKeyRequest { scope, key, reason } = asked;
    let reason = extract::reason(Some(reason))?.ok_or_else(|| {
        Problem::bad_request("reason is needed: it is recorded in the audit trail")
    })?;
    let name = KeyPosition { scope: scope.clone(), key: key.clone() };
    match admin.store.delete_key(name).await? {
        KeyDeleted::Deleted => {}
        KeyDeleted::Unknown => return Err(Problem::not_found("no such key is stored")),
        KeyDeleted::Busy => {
            return Err(Problem::conflict(
                "a request runs under this key: delete it after its lease has ended",
            ));
        }
    }
    // The audit entry of the request itself has only the path, so this entry adds scope, key and reason.
    let entry = AuditEntry {
        at: (admin.now)(),
        who: caller.who().to_owned(),
        action: format!("deleted an Idempotency-Key: {reason}"),
        subject: format!("{scope} {key}"),
        status: 200,
    };
    if let Err(error) = admin.store.audit(vec![entry]).await {
        tracing::warn!(%error, "the deletion of a key is missing in the audit trail: {error}");
    }
    tracing::info!(token = caller.who(), "{} deleted an Idempotency-Key of {scope}", caller.who());
    Ok(Json(DeletedKey { scope, key }))
}

/// A scope and a key as one word, for cursors and paths.
pub(super) fn name_of(scope: &str, key: &str) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(format!("{scope}\n{key}"))
}

/// The scope and the key in such a word. Both are printable, so the line break separates them.
pub(super) fn position(name: &str) -> Option<KeyPosition> {
    let text = String::from_utf8(BASE64_URL_SAFE_NO_PAD.decode(name).ok()?).ok()?;
    let (scope, key) = text.split_once('\n')?;
    let is_printable = |text: &str| text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    (is_printable(scope) && is_printable(key))
        .then(|| KeyPosition { scope: scope.to_owned(), key: key.to_owned() })
}
