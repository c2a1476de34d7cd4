//! Which secret accepted an arrival.

use std::sync::Arc;

use hapax_core::store::{
    Action, EventName, Inspect, Lookup, SecretUse, Store, Verifier, VerifierNames,
};
use hapax_core::{SourceName, Tenant, Timestamp};

use crate::harness::{Sender, World, after, body, noon};
use crate::sending::Sending;

pub(crate) async fn an_arrival_names_what_verified_it<S: Store + Inspect + VerifierNames>(
    store: Arc<S>,
) {
    // The name may be recorded after the event, twice, or by two nodes at once. A secret that is inserted
    // into the config before another must not change the name under which the other's arrivals are
    // recorded.
    let named = |secret: &str| Verifier { scheme: "stripe".to_owned(), secret: secret.to_owned() };
    let (old, new) = (named("env:OLD"), named("file:/run/new"));
    assert_ne!(old.number(), new.number());
    assert!(old.number() < 1 << 31);
    let sender = Sender::plain();
    for (id, by) in [("evt_1", &old), ("evt_1", &new), ("evt_2", &named("never recorded"))] {
        let mut ingest = sender.ingest(&body(id));
        ingest.via.secret = by.number();
        store.ingest(ingest).await.expect("ingests");
    }
    store.name_verifiers(vec![new.clone(), old.clone()]).await.expect("records");
    store.name_verifiers(vec![old.clone()]).await.expect("records");
    store.flush_copies().await;
    let of = async |id: &str| -> Vec<Option<Verifier>> {
        let found = store.event(&EventName::Theirs(id.into())).await.expect("reads");
        let Lookup::One(event) = found else { panic!("{found:?}") };
        event.arrivals.into_iter().map(|arrival| arrival.verifier).collect()
    };
    assert_eq!(of("evt_1").await, [Some(old), Some(new)]);
    assert_eq!(of("evt_2").await, [None]);
}

pub(crate) async fn a_secret_is_known_since_its_first_record_and_keeps_its_last_use<
    S: Sending + VerifierNames,
>(
    world: World<S>,
) {
    // Another node records an older use later, the same secret serves two sources, and a tenant is
    // deleted.
    let used = |tenant: &str, source: &str, secret: &str, used_at: Option<Timestamp>| SecretUse {
        tenant: Tenant::new(tenant),
        source: SourceName::new(source),
        verifier: Verifier { scheme: "stripe".to_owned(), secret: secret.to_owned() },
        used_at,
    };
    let note = async |uses: Vec<SecretUse>| world.store.note_secrets(uses).await.expect("notes");
    let read = async |source: &str, limit: usize| {
        let source = SourceName::new(source);
        let records = world.store.secrets_of(&source, limit).await.expect("reads").into_iter();
        let line = |record: hapax_core::store::SecretRecord| {
            let name = format!("{} {}", record.tenant, record.verifier.secret);
            (name, record.known_since, record.used_at)
        };
        records.map(line).collect::<Vec<_>>()
    };
    note(vec![used("b", "shop", "env:OLD", None), used("a", "shop", "env:A", None)]).await;
    world.pass(100);
    note(vec![
        used("b", "shop", "env:OLD", Some(after(50))),
        used("b", "shop", "env:NEW", Some(after(90))),
        used("b", "shop", "env:NEW", Some(after(80))),
        used("b", "bank", "env:OLD", None),
    ])
    .await;
    note(vec![
        used("b", "shop", "env:OLD", Some(after(40))),
        used("b", "shop", "env:NEW", None),
        used("a", "shop", "env:A", Some(after(60))),
    ])
    .await;
    note(Vec::new()).await;
    let expected = [
        ("a env:A".to_owned(), noon(), Some(after(60))),
        ("b env:NEW".to_owned(), after(100), Some(after(90))),
        ("b env:OLD".to_owned(), noon(), Some(after(50))),
    ];
    assert_eq!(read("shop", 9).await, expected);
    assert_eq!(read("shop", 2).await, expected[..2]);
    assert_eq!(read("bank", 9).await, [("b env:OLD".to_owned(), after(100), None)]);
    assert_eq!(read("none", 9).await, []);
    let by = Action { who: "ops".to_owned(), reason: None, at: after(100) };
    world.store.delete_tenant(Tenant::new("b"), by).await.expect("deletes");
    assert_eq!(read("shop", 9).await, expected[..1]);
    assert_eq!(read("bank", 9).await, []);
}
