//! The audit trail: requests that change something, and those that were refused.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use hapax_core::store::AuditFilter;

use super::extract::{QueryParams, cursor, limit};
use super::problem::Problem;
use super::{Admin, AdminStore};
use crate::api::{AuditEntry, AuditQuery, List};

/// `GET /api/v1/audit`.
pub(super) async fn list<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    QueryParams(query): QueryParams<AuditQuery>,
) -> Result<Json<List<AuditEntry>>, Problem> {
    let filter =
        AuditFilter { who: query.who, before: cursor(query.cursor)?, limit: limit(query.limit)? };
    let page = admin.store.audited(filter).await?;
    Ok(Json(page.into()))
}
