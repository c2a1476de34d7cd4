//! How the attempts of endpoints went in the last 24 hours, for the dashboard and for the portal.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use hapax_core::Timestamp;
use hapax_core::endpoint::EndpointId;
use hapax_core::store::{EndpointHistory, StoreError};
use jiff::SignedDuration;

use super::extract::PathId;
use super::problem::Problem;
use super::{Admin, AdminStore, endpoints};
use crate::api::EndpointRates;

/// The hours that are shown: the current one and those before.
const SHOWN: SignedDuration = SignedDuration::from_hours(23);

/// `GET /api/v1/endpoints/{id}/figures`.
pub(super) async fn show<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    PathId(id): PathId,
) -> Result<Json<EndpointRates>, Problem> {
    let endpoint = endpoints::find(&admin, &id).await?;
    let mut rates = rates(&*admin.store, vec![endpoint.id], (admin.now)()).await?;
    Ok(Json(rates.remove(&endpoint.id).unwrap_or_default()))
}

/// The figures of each of these endpoints. One without an attempt is left out.
pub(super) async fn rates<S: EndpointHistory>(
    store: &S,
    endpoints: Vec<EndpointId>,
    now: Timestamp,
) -> Result<HashMap<EndpointId, EndpointRates>, StoreError> {
    let from = now.checked_sub(SHOWN).unwrap_or(Timestamp::MIN);
    let hours = store.endpoint_hours(endpoints, from).await?;
    let by_endpoint = hours.chunk_by(|a, b| a.endpoint == b.endpoint);
    let rates = by_endpoint.filter_map(|hours| {
        let first = hours.first()?;
        Some((first.endpoint, EndpointRates::of(hours.iter())))
    });
    Ok(rates.collect())
}
