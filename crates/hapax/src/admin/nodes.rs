//! The nodes that work on the database of this one.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;

use super::problem::Problem;
use super::{Admin, AdminStore};
use crate::api::{List, Node};

/// `GET /api/v1/nodes`.
pub(super) async fn list<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
) -> Result<Json<List<Node>>, Problem> {
    let nodes = admin.store.nodes().await?;
    Ok(Json(List::whole(nodes.into_iter().map(Node::from).collect())))
}
