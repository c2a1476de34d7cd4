//! Links to the portal: codes that work once, sessions that end with their link, and the bound of pings.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::limits::{PORTAL_PINGS_MAX, PORTAL_PINGS_WITHIN};
use hapax_core::store::{
    Action, PortalLink, PortalLinkId, PortalLinks, PortalRights, TenantDeletions,
};
use hapax_core::{Tenant, Timestamp};
use uuid::Uuid;

const HOUR: Duration = Duration::from_secs(3_600);

fn now() -> Timestamp {
    Timestamp::now().round(jiff::Unit::Microsecond).unwrap()
}

fn link(tenant: &str, expires_at: Timestamp) -> PortalLink {
    PortalLink {
        id: PortalLinkId(Uuid::now_v7()),
        tenant: Tenant::new(tenant),
        rights: PortalRights { replay: true, endpoints: false },
        created_at: expires_at - HOUR,
        expires_at,
        entered_at: None,
    }
}

pub(crate) async fn a_code_works_once_and_its_session_belongs_to_its_link<S: PortalLinks>(
    store: Arc<S>,
) {
    let at = now();
    let (one, other) = (link("acme", at + HOUR), link("shop", at + HOUR));
    store.create_portal_link(one.clone(), [1; 32]).await.expect("creates");
    store.create_portal_link(other.clone(), [2; 32]).await.expect("creates");
    // Looking at a code does not use it.
    for _ in 0..2 {
        assert_eq!(store.portal_link([1; 32]).await.expect("reads"), Some(one.clone()));
    }
    assert_eq!(store.portal_link([9; 32]).await.expect("reads"), None);
    assert_eq!(store.portal_session(one.id, [11; 32]).await.expect("reads"), None);

    let entered = PortalLink { entered_at: Some(at), ..one.clone() };
    let found = store.enter_portal([1; 32], [11; 32], at).await.expect("enters");
    assert_eq!(found.as_ref(), Some(&entered));
    for session in [11, 12] {
        let again = store.enter_portal([1; 32], [session; 32], at).await.expect("answers");
        assert_eq!(again, None, "the code worked twice");
    }
    assert_eq!(store.enter_portal([9; 32], [19; 32], at).await.expect("answers"), None);
    assert_eq!(store.portal_link([1; 32]).await.expect("reads").as_ref(), Some(&entered));
    assert_eq!(store.portal_session(one.id, [11; 32]).await.expect("reads"), Some(entered));
    // A session opens no other link, and no other session opens this one.
    assert_eq!(store.portal_session(other.id, [11; 32]).await.expect("reads"), None);
    assert_eq!(store.portal_session(one.id, [12; 32]).await.expect("reads"), None);

    store.end_portal_link(one.id).await.expect("ends");
    store.end_portal_link(one.id).await.expect("ends twice");
    assert_eq!(store.portal_session(one.id, [11; 32]).await.expect("reads"), None);
    assert_eq!(store.portal_link([2; 32]).await.expect("reads"), Some(other));
}

pub(crate) async fn of_twenty_that_use_one_code_one_enters<S: PortalLinks>(store: Arc<S>) {
    let at = now();
    store.create_portal_link(link("acme", at + HOUR), [1; 32]).await.expect("creates");
    let tasks: Vec<_> = (0..20)
        .map(|n| {
            let store = Arc::clone(&store);
            tokio::spawn(async move { store.enter_portal([1; 32], [n; 32], at).await })
        })
        .collect();
    let mut winners = 0;
    for task in tasks {
        winners += usize::from(task.await.expect("no panic").expect("answers").is_some());
    }
    assert_eq!(winners, 1);
}

pub(crate) async fn a_link_that_has_ended_lets_nobody_in_and_is_deleted_with_the_next_one<
    S: PortalLinks,
>(
    store: Arc<S>,
) {
    let at = now();
    store.create_portal_link(link("acme", at - HOUR), [1; 32]).await.expect("creates");
    assert_eq!(store.enter_portal([1; 32], [11; 32], at).await.expect("answers"), None);
    store.create_portal_link(link("acme", at + HOUR), [2; 32]).await.expect("creates");
    assert_eq!(store.portal_link([1; 32]).await.expect("reads"), None);
    assert!(store.enter_portal([2; 32], [12; 32], at).await.expect("answers").is_some());
}

pub(crate) async fn revoking_ends_every_link_of_one_tenant<S: PortalLinks>(store: Arc<S>) {
    let at = now();
    let (one, two) = (link("acme", at + HOUR), link("acme", at + HOUR));
    store.create_portal_link(one.clone(), [1; 32]).await.expect("creates");
    store.create_portal_link(two, [2; 32]).await.expect("creates");
    store.create_portal_link(link("shop", at + HOUR), [3; 32]).await.expect("creates");
    store.enter_portal([1; 32], [11; 32], at).await.expect("enters").expect("a link");
    assert_eq!(store.revoke_portal_links(Tenant::new("acme")).await.expect("revokes"), 2);
    assert_eq!(store.revoke_portal_links(Tenant::new("acme")).await.expect("revokes"), 0);
    assert_eq!(store.portal_session(one.id, [11; 32]).await.expect("reads"), None);
    assert_eq!(store.enter_portal([2; 32], [12; 32], at).await.expect("answers"), None);
    assert!(store.enter_portal([3; 32], [13; 32], at).await.expect("answers").is_some());
}

pub(crate) async fn a_list_has_every_link_that_has_not_ended<S: PortalLinks>(store: Arc<S>) {
    let at = now();
    let minute = |n: u64| Duration::from_secs(60 * n);
    let links = [("acme", 0), ("shop", 1), ("acme", 2)]
        .map(|(tenant, minutes)| link(tenant, at + HOUR + minute(minutes)));
    for (n, link) in links.iter().enumerate() {
        store.create_portal_link(link.clone(), [n as u8; 32]).await.expect("creates");
    }
    store.enter_portal([2; 32], [12; 32], at).await.expect("enters").expect("a link");
    let list = async |tenant: Option<&str>, at: Timestamp, limit: usize| {
        let found = store.portal_links(tenant.map(Tenant::new), at, limit).await.expect("reads");
        found.into_iter().map(|link| (link.id, link.entered_at)).collect::<Vec<_>>()
    };
    let [first, second, third] = [&links[0], &links[1], &links[2]].map(|link| link.id);
    assert_eq!(list(None, at, 10).await, [(third, Some(at)), (second, None), (first, None)]);
    assert_eq!(list(None, at, 1).await, [(third, Some(at))]);
    assert_eq!(list(Some("acme"), at, 10).await, [(third, Some(at)), (first, None)]);
    assert_eq!(list(Some("nobody"), at, 10).await, []);
    assert_eq!(list(None, at + HOUR + minute(1), 10).await, [(third, Some(at))]);
    store.end_portal_link(third).await.expect("ends");
    assert_eq!(list(None, at, 10).await, [(second, None), (first, None)]);
}

pub(crate) async fn the_links_of_a_tenant_go_with_its_data<S: PortalLinks + TenantDeletions>(
    store: Arc<S>,
) {
    let at = now();
    let one = link("acme", at + HOUR);
    store.create_portal_link(one.clone(), [1; 32]).await.expect("creates");
    store.create_portal_link(link("shop", at + HOUR), [2; 32]).await.expect("creates");
    store.enter_portal([1; 32], [11; 32], at).await.expect("enters").expect("a link");
    let by = Action { who: "ops".to_owned(), reason: None, at };
    store.delete_tenant(Tenant::new("acme"), by).await.expect("deletes");
    assert_eq!(store.portal_session(one.id, [11; 32]).await.expect("reads"), None);
    assert!(store.portal_link([2; 32]).await.expect("reads").is_some());
}

pub(crate) async fn a_tenant_has_at_most_so_many_pings_in_a_minute<S: PortalLinks>(store: Arc<S>) {
    // All at once, from several nodes: the bound holds although none has seen the others.
    let at = now();
    let (acme, shop) = (Tenant::new("acme"), Tenant::new("shop"));
    let tasks: Vec<_> = (0..PORTAL_PINGS_MAX + 5)
        .map(|_| {
            let (store, acme) = (Arc::clone(&store), acme.clone());
            tokio::spawn(async move { store.take_portal_ping(acme, at).await })
        })
        .collect();
    let mut taken = 0;
    for task in tasks {
        taken += usize::from(task.await.expect("no panic").expect("answers"));
    }
    assert_eq!(taken, PORTAL_PINGS_MAX);
    let almost = at + PORTAL_PINGS_WITHIN - Duration::from_millis(1);
    assert!(!store.take_portal_ping(acme.clone(), almost).await.expect("answers"));
    assert!(store.take_portal_ping(shop, at).await.expect("answers"), "another tenant");
    let later = at + PORTAL_PINGS_WITHIN;
    for n in 0..PORTAL_PINGS_MAX {
        assert!(store.take_portal_ping(acme.clone(), later).await.expect("answers"), "ping {n}");
    }
    assert!(!store.take_portal_ping(acme, later).await.expect("answers"));
}
