//! The last refused requests of a source.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use hapax_core::SourceName;

use super::extract::PathId;
use super::problem::Problem;
use super::{Admin, AdminStore};
use crate::api::{List, Rejection};

/// `GET /api/v1/sources/{source}/rejections`.
pub(super) async fn list<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    PathId(source): PathId,
) -> Result<Json<List<Rejection>>, Problem> {
    admin.rejections.record(&*admin.store).await;
    let rejections = admin.store.rejections(&SourceName::new(source)).await?;
    Ok(Json(List::whole(rejections.into_iter().map(Rejection::from).collect())))
}
