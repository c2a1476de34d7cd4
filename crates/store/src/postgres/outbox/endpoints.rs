//! Creates and changes endpoints.

use hapax_core::endpoint::{
    AddressChoice, EndpointAct, EndpointChanged, EndpointId, EndpointRecord, EndpointSealed,
    EndpointSettings, NewEndpoint,
};
use hapax_core::limits::{ENDPOINTS_PER_TENANT_MAX, RECEIVER_ENDPOINTS_PER_TENANT_MAX};
use hapax_core::message::Payload;
use hapax_core::rate_limit::RateLimit;
use hapax_core::store::Action;

use super::row::{key_number, record};
use crate::postgres::Shared;
use crate::postgres::connect::PgError;
use crate::postgres::handler_registry::micros;
use crate::postgres::jobs::only;
use crate::postgres::row::{stamp, text};

/// Settings and sealed values as their columns.
#[derive(Debug, Default)]
struct Columns {
    settings: Option<String>,
    uid: Option<String>,
    types: Option<Vec<String>>,
    api_version: Option<String>,
    is_thin: Option<bool>,
    max_in_flight: Option<i32>,
    retry: Option<Vec<i64>>,
    lease: Option<i64>,
    keeps_order: bool,
    parks_dead: bool,
    auto_disable: bool,
    rate_interval: Option<i64>,
    secrets: Option<Vec<u8>>,
    headers: Option<Vec<u8>>,
    key_ids: Option<Vec<i64>>,
}

impl Columns {
    fn of(settings: &EndpointSettings, sealed: &EndpointSealed) -> Self {
        let policy = settings.policy();
        Self {
            settings: Some(serde_json::to_string(settings).expect("settings are JSON")),
            uid: settings.uid.as_deref().map(text),
            types: Some(settings.types.globs().iter().map(|glob| like(glob)).collect()),
            api_version: settings.api_version.as_deref().map(text),
            is_thin: Some(settings.payload == Payload::Thin),
            max_in_flight: Some(i32::try_from(settings.max_in_flight).unwrap_or(i32::MAX)),
            retry: Some(policy.retry.iter().copied().map(micros).collect()),
            lease: Some(micros(policy.lease)),
            keeps_order: settings.keeps_order(),
            parks_dead: settings.parks_dead(),
            auto_disable: settings.auto_disable,
            rate_interval: settings.rate_limit.map(RateLimit::interval_us),
            secrets: Some(sealed.secrets.as_bytes().to_vec()),
            headers: sealed.headers.as_ref().map(|headers| headers.as_bytes().to_vec()),
            key_ids: Some(sealed.key_ids().map(key_number).collect()),
        }
    }
}

/// A glob over types as a pattern for `LIKE`: `*` matches any characters, and nothing else is special.
fn like(glob: &str) -> String {
    let mut pattern = String::with_capacity(glob.len());
    for letter in text(glob).chars() {
        match letter {
            '*' => pattern.push('%'),
            '%' | '_' | '\\' => pattern.extend(['\\', letter]),
            other => pattern.push(other),
        }
    }
    pattern
}

pub(super) async fn create(
    shared: &Shared,
    new: &NewEndpoint,
    by: &Action,
) -> Result<EndpointChanged, PgError> {
    let NewEndpoint { id, tenant, settings, sealed } = new;
    let columns = Columns::of(settings, sealed);
    let most = i32::try_from(ENDPOINTS_PER_TENANT_MAX).unwrap_or(i32::MAX);
    let receivers_most = match settings.address_by {
        AddressChoice::Operator => None,
        AddressChoice::Receiver => i32::try_from(RECEIVER_ENDPOINTS_PER_TENANT_MAX).ok(),
    };
    let mut client = shared.pools.admin.checkout().await?;
    let rows = client
        .query(
            "SELECT verdict, created_at FROM hapax.create_endpoint($1, $2, $3, $4, $5, $6, $7, $8, $9, \
             $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23)",
            &[
                &id.0,
                &tenant.as_str(),
                &columns.settings,
                &columns.uid,
                &columns.types,
                &columns.api_version,
                &columns.is_thin,
                &columns.max_in_flight,
                &columns.retry,
                &columns.lease,
                &columns.secrets,
                &columns.headers,
                &columns.key_ids,
                &text(&by.who),
                &by.reason.as_deref().map(text),
                &stamp(by.at),
                &most,
                &shared.now(),
                &columns.keeps_order,
                &columns.parks_dead,
                &columns.auto_disable,
                &columns.rate_interval,
                &receivers_most,
            ],
        )
        .await?;
    let row = only(&rows)?;
    Ok(match row.get(0) {
        0 => EndpointChanged::Changed(Box::new(EndpointRecord {
            id: *id,
            tenant: tenant.clone(),
            settings: settings.clone(),
            sealed: sealed.clone(),
            version: 1,
            created_at: row.get(1),
            disabled: None,
            failing: None,
        })),
        verdict => refusal(verdict),
    })
}

pub(super) async fn change(
    shared: &Shared,
    endpoint: EndpointId,
    act: &EndpointAct,
    by: &Action,
) -> Result<EndpointChanged, PgError> {
    let (number, version, columns, disable_reason) = match act {
        EndpointAct::Change { version, settings, sealed } => {
            let version = i64::try_from(*version).unwrap_or(i64::MAX);
            (0, version, Columns::of(settings, sealed), None)
        }
        EndpointAct::Disable { reason } => (1, 0, Columns::default(), Some(text(reason))),
        EndpointAct::Enable => (2, 0, Columns::default(), None),
        EndpointAct::Delete => (3, 0, Columns::default(), None),
        EndpointAct::DisableByReceiver { reason } => (4, 0, Columns::default(), Some(text(reason))),
        EndpointAct::EnableByReceiver => (5, 0, Columns::default(), None),
    };
    let mut client = shared.pools.admin.checkout().await?;
    let rows = client
        .query(
            "SELECT * FROM hapax.change_endpoint($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, \
             $14, $15, $16, $17, $18, $19, $20, $21, $22, $23)",
            &[
                &endpoint.0,
                &number,
                &version,
                &columns.settings,
                &columns.uid,
                &columns.types,
                &columns.api_version,
                &columns.is_thin,
                &columns.max_in_flight,
                &columns.retry,
                &columns.lease,
                &columns.secrets,
                &columns.headers,
                &columns.key_ids,
                &disable_reason,
                &text(&by.who),
                &by.reason.as_deref().map(text),
                &stamp(by.at),
                &shared.now(),
                &columns.keeps_order,
                &columns.parks_dead,
                &columns.auto_disable,
                &columns.rate_interval,
            ],
        )
        .await?;
    let row = only(&rows)?;
    Ok(match row.get(0) {
        0 => match record(row, 1) {
            Some(record) => EndpointChanged::Changed(Box::new(record)),
            None => EndpointChanged::Unknown,
        },
        verdict => refusal(verdict),
    })
}

/// The answer for an endpoint that was not changed.
fn refusal(verdict: i32) -> EndpointChanged {
    match verdict {
        1 => EndpointChanged::Deleted,
        3 => EndpointChanged::UidTaken,
        4 => EndpointChanged::TooMany,
        5 => EndpointChanged::VersionChanged,
        6 => EndpointChanged::DisabledByOperator,
        _unknown => EndpointChanged::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_star_of_a_glob_is_special_in_its_pattern() {
        // `_` is common in types, and a wildcard in LIKE.
        let check = |glob: &str, expected: &str| assert_eq!(like(glob), expected);
        check("invoice.*", "invoice.%");
        check("order_paid", "order\\_paid");
        check("100%\\*", "100\\%\\\\%");
    }
}
