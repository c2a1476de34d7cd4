//! The secrets of a source: how old each is, and which one the sender last signed with.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use hapax_core::store::{SecretRecord, Verifier};
use hapax_core::{SourceName, Timestamp};

use super::extract::PathId;
use super::problem::Problem;
use super::{Admin, AdminStore};
use crate::alerts::SecretEnds;
use crate::api::{List, SourceSecret};

/// The most secrets that are listed: a source may have thousands of tenants.
const LISTED_MAX: usize = 200;

/// `GET /api/v1/sources/{source}/secrets`.
pub(super) async fn list<S: AdminStore>(
    State(admin): State<Arc<Admin<S>>>,
    PathId(source): PathId,
) -> Result<Json<List<SourceSecret>>, Problem> {
    let source = SourceName::new(source);
    let records = admin.store.secrets_of(&source, LISTED_MAX).await?;
    let mut secrets = merged(admin.watch.secrets_of(&source), records);
    secrets.truncate(LISTED_MAX);
    Ok(Json(List::whole(secrets)))
}

/// The configured secrets in the order of the config, then those that are not configured any more; by tenant.
fn merged(configured: Vec<SecretEnds>, records: Vec<SecretRecord>) -> Vec<SourceSecret> {
    let mut by_tenant: BTreeMap<String, Vec<SourceSecret>> = BTreeMap::new();
    for SecretEnds { tenant, verifiers, until, .. } in configured {
        let secrets = by_tenant.entry(tenant.clone()).or_default();
        // A sender's public key has no end.
        let ends = until.into_iter().chain(std::iter::repeat(None));
        for (verifier, until) in verifiers.into_iter().zip(ends) {
            secrets.push(SourceSecret { until, ..secret(&tenant, verifier, true) });
        }
    }
    for SecretRecord { tenant, verifier, known_since, used_at } in records {
        let tenant = tenant.to_string();
        let secrets = by_tenant.entry(tenant.clone()).or_default();
        let is_same =
            |one: &SourceSecret| (&one.scheme, &one.secret) == (&verifier.scheme, &verifier.secret);
        if !secrets.iter().any(is_same) {
            secrets.push(secret(&tenant, verifier.clone(), false));
        }
        for one in secrets.iter_mut().filter(|one| is_same(one)) {
            (one.known_since, one.last_used_at) = (Some(known_since), used_at);
        }
    }
    for secrets in by_tenant.values_mut() {
        let last: Option<Timestamp> = secrets.iter().filter_map(|one| one.last_used_at).max();
        for one in secrets.iter_mut() {
            one.signed_last = last.is_some() && one.last_used_at == last;
        }
    }
    by_tenant.into_values().flatten().collect()
}

fn secret(tenant: &str, Verifier { scheme, secret }: Verifier, configured: bool) -> SourceSecret {
    SourceSecret {
        tenant: tenant.to_owned(),
        secret,
        scheme,
        known_since: None,
        last_used_at: None,
        signed_last: false,
        until: None,
        configured,
    }
}

#[cfg(test)]
mod tests {
    use hapax_core::Tenant;

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn configured_secrets_come_first_and_one_of_each_tenant_signed_last() {
        let verifier =
            |secret: &str| Verifier { scheme: "stripe".to_owned(), secret: secret.to_owned() };
        let configured = |tenant: &str, secrets: &[&str], until: &[Option<i64>]| SecretEnds {
            source: SourceName::new("stripe"),
            tenant: tenant.to_owned(),
            verifiers: secrets.iter().map(|secret| verifier(secret)).collect(),
            until: until.iter().map(|second| second.map(at)).collect(),
        };
        let record = |tenant: &str, secret: &str, used: Option<i64>| SecretRecord {
            tenant: Tenant::new(tenant),
            verifier: verifier(secret),
            known_since: at(1),
            used_at: used.map(at),
        };
        let shown = merged(
            vec![
                configured("b", &["env:NEW", "env:OLD"], &[None, Some(90)]),
                configured("a", &["the sender's public key"], &[]),
            ],
            vec![
                record("b", "env:OLD", Some(50)),
                record("b", "env:NEW", None),
                record("b", "env:GONE", Some(7)),
            ],
        );
        let lines: Vec<_> = shown
            .iter()
            .map(|one| {
                let SourceSecret { tenant, secret, .. } = one;
                let seconds = |at: Option<Timestamp>| at.map(|at| at.as_second());
                let times = (seconds(one.known_since), seconds(one.last_used_at));
                (&**tenant, &**secret, times, seconds(one.until), one.configured, one.signed_last)
            })
            .collect();
        assert_eq!(
            lines,
            [
                ("a", "the sender's public key", (None, None), None, true, false),
                ("b", "env:NEW", (Some(1), None), None, true, false),
                ("b", "env:OLD", (Some(1), Some(50)), Some(90), true, true),
                ("b", "env:GONE", (Some(1), Some(7)), None, false, false),
            ]
        );
    }
}
