//! The secrets of tenants that are added at run time, case by case.

use std::sync::Arc;

use hapax_core::store::{
    SourcePair, SourceSecretSet, SourceSecretStore, SourceSecretsAct, SourceSecretsChange,
    SourceSecretsChanged,
};
use hapax_core::vault::{SealContext, Sealed};
use hapax_core::{SourceName, Tenant};

use crate::harness::{Working, World};
use crate::sending::vault;

/// A store of these cases.
pub(crate) trait Kept: Working + SourceSecretStore {}
impl<S: Working + SourceSecretStore> Kept for S {}

fn pair(tenant: &str, source: &str) -> SourcePair {
    SourcePair { tenant: Tenant::new(tenant), source: SourceName::new(source) }
}

fn sealed(pair: &SourcePair, key: u8, text: &str) -> Sealed {
    let context = SealContext::source_secrets(&pair.tenant, &pair.source);
    vault(key).seal(&context, text.as_bytes(), [7; 12])
}

impl<S: Kept> World<S> {
    async fn secret_set(&self) -> SourceSecretSet {
        let mut set = self.store.source_secrets().await.expect("reads");
        assert_eq!(self.store.source_secrets_version().await.expect("reads"), set.version);
        set.pairs.sort_by(|one, other| one.pair.cmp(&other.pair));
        set
    }

    async fn change_secrets(
        &self,
        version: u64,
        pair: &SourcePair,
        act: SourceSecretsAct,
    ) -> SourceSecretsChanged {
        let change = SourceSecretsChange { version, pair: pair.clone(), act };
        self.store.change_source_secrets(change, self.by("a test")).await.expect("changes")
    }
}

pub(crate) async fn secrets_of_a_pair_are_set_replaced_and_removed<S: Kept>(world: World<S>) {
    // The same tenant of another source, and another tenant of the same source, are other pairs.
    let pairs = [pair("acme", "github"), pair("acme", "stripe"), pair("globex", "stripe")];
    assert_eq!((world.secret_set().await.version, world.secret_set().await.pairs.len()), (0, 0));
    for (version, pair) in (0..).zip(&pairs) {
        let act = SourceSecretsAct::Set(sealed(pair, 1, "first"));
        let changed = world.change_secrets(version, pair, act).await;
        assert_eq!(changed, SourceSecretsChanged::Changed { version: version + 1 });
    }
    let first_at = world.clock.now();
    world.clock.pass(5);
    let again = SourceSecretsAct::Set(sealed(&pairs[1], 1, "second"));
    world.change_secrets(3, &pairs[1], again).await;
    let set = world.secret_set().await;
    assert_eq!(set.version, 4);
    let found: Vec<_> = set.pairs.iter().map(|it| (&it.pair, it.set_at)).collect();
    let now = world.clock.now();
    assert_eq!(found, [(&pairs[0], first_at), (&pairs[1], now), (&pairs[2], first_at)]);
    assert_eq!(set.pairs[1].sealed, Ok(sealed(&pairs[1], 1, "second")));
    assert_eq!(set.pairs[2].sealed, Ok(sealed(&pairs[2], 1, "first")));

    let removed = world.change_secrets(4, &pairs[0], SourceSecretsAct::Delete).await;
    assert_eq!(removed, SourceSecretsChanged::Changed { version: 5 });
    let left: Vec<_> = world.secret_set().await.pairs.into_iter().map(|it| it.pair).collect();
    assert_eq!(left, pairs[1..]);
    let gone = world.change_secrets(5, &pairs[0], SourceSecretsAct::Delete).await;
    assert_eq!(gone, SourceSecretsChanged::Unknown);
    assert_eq!(world.secret_set().await.version, 5);
}

pub(crate) async fn of_twenty_changes_by_one_version_of_the_set_one_wins<S: Kept>(world: World<S>) {
    // Two operators give the same secret to two tenants at once. Each operator has seen a set without that
    // secret, so one of them has to read the set again. Every change applies to another pair, so no row
    // conflicts with another.
    let world = Arc::new(world);
    for round in 0..5 {
        let tasks: Vec<_> = (0..20)
            .map(|n| {
                let (world, pair) = (Arc::clone(&world), pair(&format!("t{round}-{n}"), "stripe"));
                tokio::spawn(async move {
                    let act = SourceSecretsAct::Set(sealed(&pair, 1, "shared"));
                    world.change_secrets(round, &pair, act).await
                })
            })
            .collect();
        let mut won = 0;
        for task in tasks {
            match task.await.expect("no panic") {
                SourceSecretsChanged::Changed { version } => {
                    assert_eq!(version, round + 1);
                    won += 1;
                }
                other => assert_eq!(other, SourceSecretsChanged::VersionChanged),
            }
        }
        assert_eq!(won, 1);
        assert_eq!(world.secret_set().await.pairs.len(), usize::try_from(round).unwrap() + 1);
    }
}

pub(crate) async fn resealing_replaces_the_sealed_value_and_nothing_else<S: Kept>(world: World<S>) {
    let pair = pair("acme", "stripe");
    let unknown = SourceSecretsAct::Reseal(sealed(&pair, 2, "the secret"));
    let changed = world.change_secrets(0, &pair, unknown.clone()).await;
    assert_eq!((changed, world.secret_set().await.pairs.len()), (SourceSecretsChanged::Unknown, 0));
    world.change_secrets(0, &pair, SourceSecretsAct::Set(sealed(&pair, 1, "the secret"))).await;
    let set_at = world.clock.now();
    world.clock.pass(5);
    let changed = world.change_secrets(1, &pair, unknown).await;
    assert_eq!(changed, SourceSecretsChanged::Changed { version: 2 });
    let set = world.secret_set().await;
    assert_eq!((set.pairs[0].set_at, set.version), (set_at, 2));
    assert_eq!(set.pairs[0].sealed, Ok(sealed(&pair, 2, "the secret")));
}
