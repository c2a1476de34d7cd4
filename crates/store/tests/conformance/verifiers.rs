//! Which secret accepted an arrival.

use std::sync::Arc;

use hapax_core::store::{EventName, Inspect, Lookup, Store, Verifier, VerifierNames};

use crate::harness::{Sender, body};

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
