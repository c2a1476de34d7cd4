//! Deleting a tenant's data: all of it is deleted, except the keys that recognise copies.

use hapax_core::job::Retry;
use hapax_core::order::OrderPolicy;
use hapax_core::store::{
    Held, Lookup, MessageFilter, NewMessage, Published, Settlement, SourcePair, SourceSecretsAct,
    SourceSecretsChange, SourceSecretsChanged, Status, TenantDeletion, Verdict,
};
use hapax_core::vault::SealContext;
use hapax_core::{SourceName, Tenant};

use crate::harness::{
    DatabaseDirectory, Sender, World, body, done, failed, job, ordered, placed, spec,
};
use crate::sending::{self, ALL, Sending, delivered, message, vault, wanting};

fn acme() -> Tenant {
    Tenant::new("acme")
}

fn for_acme(id: &str) -> NewMessage {
    message(id).with_tenant("acme").with_key("customer-7")
}

impl<S: Sending> World<S> {
    async fn delete_acme(&self) -> TenantDeletion {
        let by = self.by("the customer asked for it");
        self.store.delete_tenant(acme(), by).await.expect("deletes")
    }

    /// Erases until nothing is left to do, a little at a time.
    async fn erase_all(&self) -> TenantDeletion {
        for _ in 0..1_000 {
            while self.store.erase(2).await.expect("erases") {}
            let found = self.store.tenant_deletion(acme()).await.expect("reads");
            let deletion = found.expect("is there");
            if deletion.ended_at.is_some() {
                return deletion;
            }
            // A transaction of the database itself may be open.
            self.pass(1);
        }
        panic!("the deletion never ends");
    }

    async fn set_secrets(&self, tenant: &Tenant) {
        let source = SourceName::new("shop");
        let version = self.store.source_secrets_version().await.expect("reads");
        let sealed =
            vault(1).seal(&SealContext::source_secrets(tenant, &source), b"a secret", [7; 12]);
        let pair = SourcePair { tenant: tenant.clone(), source };
        let change = SourceSecretsChange { version, pair, act: SourceSecretsAct::Set(sealed) };
        let changed = self.store.change_source_secrets(change, self.by("set")).await;
        assert!(matches!(changed, Ok(SourceSecretsChanged::Changed { .. })), "{changed:?}");
    }

    async fn messages_of(&self, tenant: &Tenant) -> usize {
        let filter =
            MessageFilter { tenant: Some(tenant.clone()), limit: 100, ..MessageFilter::default() };
        self.store.messages(filter).await.expect("reads").items.len()
    }
}

pub(crate) async fn a_deleted_tenant_loses_everything_but_what_recognises_copies<S: Sending>(
    world: World<S>,
) {
    // The tenant has events and deliveries in every state, and work under way. The data of another
    // tenant must not change.
    world.announce([spec("fee")]).await;
    let sender = Sender::of("acme", "shop");
    let arrive = async |id: &str| match world.arrive(&sender, id, &[job("fee")]).await {
        Verdict::Accepted(id) => id,
        other => panic!("{other:?}"),
    };
    let done_id = arrive("done").await;
    assert_eq!(world.do_all("fee").await, ["done"]);
    arrive("dead").await;
    let claim = world.claim_one("fee").await;
    world.settle(&claim, failed(Retry::Never)).await;
    let running_id = arrive("running").await;
    let running = world.claim_one("fee").await;
    arrive("waiting").await;
    world.accept("neighbour", &[job("fee")]).await;

    let endpoint = world.add_for(acme(), wanting(&["invoice.*"])).await;
    let other = world.add(wanting(&["invoice.*"])).await;
    world.send(for_acme("delivered")).await;
    assert_eq!(world.deliver_all().await, ["delivered"]);
    world.send(for_acme("dead")).await;
    let claim = world.take_one().await;
    assert_eq!(world.report(&claim, sending::failed(Retry::Never)).await, Held::Kept);
    world.send(for_acme("sending")).await;
    let sending = world.take_one().await;
    world.send(for_acme("waiting")).await;
    world.send(message("of_neighbour")).await;
    world.set_secrets(&acme()).await;
    world.set_secrets(&Tenant::default()).await;

    let begun = world.delete_acme().await;
    assert_eq!((begun.began_at, begun.ended_at, begun.endpoints), (world.clock.now(), None, 1));
    assert_eq!(world.store.endpoint(endpoint).await.expect("reads"), None);
    let secrets = world.store.source_secrets().await.expect("reads");
    let tenants: Vec<_> = secrets.pairs.iter().map(|one| one.pair.tenant.as_str()).collect();
    assert_eq!(tenants, ["default"]);
    let deletion = world.erase_all().await;
    assert_eq!((deletion.endpoints, deletion.events, deletion.messages), (1, 4, 4));

    for id in ["done", "dead", "running", "waiting"] {
        let found = world.lookup(id).await;
        assert!(matches!(found, Lookup::None), "{id}: {found:?}");
    }
    let lost = world.settle(&running, done("too late")).await;
    assert!(matches!(lost, Settlement::Lost), "{lost:?}");
    let copy = world.arrive(&sender, "done", &[job("fee")]).await;
    let Verdict::Duplicate(known) = &copy else { panic!("{copy:?}") };
    assert_eq!(
        (known.id, known.status, known.result.as_deref()),
        (done_id, Status::Processed, None)
    );
    let copy = world.arrive(&sender, "running", &[job("fee")]).await;
    let Verdict::Duplicate(known) = &copy else { panic!("{copy:?}") };
    assert_eq!((known.id, known.status), (running_id, Status::Discarded));
    assert_eq!(world.do_all("fee").await, ["neighbour"], "and no job of a copy");

    assert_eq!(world.report(&sending, delivered()).await, Held::Lost);
    assert_eq!(world.messages_of(&acme()).await, 0);
    let again = world.publish(for_acme("delivered")).await;
    assert!(matches!(again, Published::Duplicate(_)), "{again:?}");
    assert_eq!(world.deliver_all().await, ["of_neighbour"]);
    let left = world.all_deliveries().await;
    assert!(left.iter().all(|delivery| delivery.endpoint == other), "{left:?}");
}

pub(crate) async fn what_arrives_after_a_deletion_began_stays<S: Sending>(world: World<S>) {
    // The senders were not stopped: a later version of a resource waits for a job that is under way, and the
    // event of that job is erased.
    world.announce([ordered("fee", OrderPolicy::Latest)]).await;
    let sender = Sender::of("acme", "shop");
    world.arrive(&sender, "v1", &[placed("fee", "customer-7", 1)]).await;
    let running = world.claim_one("fee").await;
    let begun = world.delete_acme().await;
    world.pass(1);
    world.arrive(&sender, "v2", &[placed("fee", "customer-7", 2)]).await;
    assert_eq!(world.claim("fee", ALL).await.len(), 0, "the first one runs");
    world.add_for(acme(), wanting(&["invoice.*"])).await;
    world.send(for_acme("later")).await;
    assert_eq!(world.delete_acme().await, begun, "one deletion at a time");
    let deletion = world.erase_all().await;
    assert_eq!((deletion.events, deletion.messages), (1, 0));
    assert!(matches!(world.settle(&running, done("")).await, Settlement::Lost));
    assert_eq!(world.do_all("fee").await, ["v2"]);
    assert_eq!(world.deliver_all().await, ["later"]);
    assert!(!world.store.erase(10).await.expect("erases"));
    let second = world.delete_acme().await;
    assert!(second.began_at > begun.began_at && second.ended_at.is_none(), "{second:?}");
    let deletion = world.erase_all().await;
    assert_eq!((deletion.endpoints, deletion.events, deletion.messages), (1, 1, 1));
    assert_eq!(world.store.tenant_deletion(Tenant::default()).await.expect("reads"), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_deletion_goes_on_after_a_restart() {
    use hapax_core::store::{Action, Store, TenantDeletions};
    let place = DatabaseDirectory::new();
    let by = || Action { who: "ops".into(), reason: None, at: hapax_core::Timestamp::now() };
    let store = place.open();
    let sender = Sender::of("acme", "shop");
    for n in 0..5 {
        let ingest = sender.ingest(&body(&format!("evt_{n}")));
        store.ingest(ingest).await.expect("ingests");
    }
    store.delete_tenant(acme(), by()).await.expect("deletes");
    assert!(store.erase(2).await.expect("erases"));
    store.close().await;
    let store = place.open();
    let half = store.tenant_deletion(acme()).await.expect("reads").expect("is there");
    assert_eq!((half.events, half.ended_at), (2, None));
    while store.erase(2).await.expect("erases") {}
    let whole = store.tenant_deletion(acme()).await.expect("reads").expect("is there");
    assert_eq!(whole.events, 5);
    assert!(whole.ended_at.is_some());
    store.close().await;
}
