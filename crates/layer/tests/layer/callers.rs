//! No caller gets the answer of another, and no secret is stored.

use std::sync::Arc;

use hapax_layer::{
    IdempotencyOutcome, IdempotencyRules, JwtKeys, METHOD_OVERRIDES, Principal, Quota, RoutePattern,
};
use hapax_sim::Act;
use http::request::Parts;
use http::{HeaderName, Method};

use crate::support::{Api, Ask, answer, charge, rules};

async fn check(api: &Api, ask: Ask, outcome: IdempotencyOutcome) {
    let heard = api.send(ask.clone()).await;
    assert_eq!(heard.outcome, Some(outcome), "{ask:?}: {heard:?}");
}

#[tokio::test]
async fn account_method_and_path_keep_keys_apart() {
    let api = Api::counting(rules());
    let elsewhere = [
        charge("k"),
        charge("k").header("x-account-id", "acct_2"),
        charge("k").method(Method::PUT),
        charge("k").path("/refunds"),
        charge("k").path("/charges/1"),
        charge("k").header("x-http-method-override", "PATCH"),
        charge("K"),
    ];
    for ask in elsewhere.clone() {
        check(&api, ask, IdempotencyOutcome::Fresh).await;
    }
    for ask in elsewhere.clone() {
        check(&api, ask, IdempotencyOutcome::Replay).await;
    }
    assert_eq!(api.effects.count(), elsewhere.len());
}

// An app that reads two spellings as one path would run the same key twice. An app that reads them as two
// resources must not get the answer of the first for the second.
#[tokio::test]
async fn every_spelling_of_a_path_is_one_path_for_its_keys() {
    let api = Api::counting(rules());
    check(&api, charge("k"), IdempotencyOutcome::Fresh).await;
    for spelling in
        ["/charges/", "//charges", "/CHARGES", "/%63harges", "/charges;a", "/..;/charges"]
    {
        check(&api, charge("k").path(spelling), IdempotencyOutcome::Mismatch).await;
    }
    check(&api, charge("k"), IdempotencyOutcome::Replay).await;
    check(&api, charge("a").path("/accounts/AbC"), IdempotencyOutcome::Fresh).await;
    check(&api, charge("a").path("/accounts/abc"), IdempotencyOutcome::Mismatch).await;
    assert_eq!(api.effects.count(), 2);
}

#[tokio::test]
async fn every_spelling_of_a_route_needs_its_key() {
    let api = Api::counting(rules().required([RoutePattern::parse("POST /charges").unwrap()]));
    let keyless = || charge("").without("idempotency-key");
    let spellings =
        ["/charges", "//charges", "/Charges", "/charges;a", "/a/../charges", "/charges%2f"];
    let mut asks: Vec<_> = spellings.iter().map(|path| keyless().path(path)).collect();
    asks.push(keyless().method(Method::from_bytes(b"post").unwrap()));
    for name in METHOD_OVERRIDES {
        asks.push(keyless().method(Method::GET).header(name.as_str(), "post"));
        asks.push(keyless().method(Method::PUT).header(name.as_str(), "POST"));
    }
    for ask in asks {
        let heard = api.send(ask.clone()).await;
        assert_eq!(heard.problem().as_deref(), Some("idempotency_key_missing"), "{ask:?}");
    }
    for path in ["/charges%00", "/other%00", "/%ff"] {
        let heard = api.send(keyless().path(path)).await;
        assert_eq!((heard.status, heard.problem().as_deref()), (400, Some("path_malformed")));
    }
    assert_eq!(api.effects.count(), 0);
}

#[tokio::test]
async fn two_apis_on_one_ledger_keep_their_keys_apart() {
    let work = |effects: crate::support::Effects, _| async move {
        Ok(answer(http::StatusCode::OK, effects.add("done").to_string()))
    };
    let shop = Api::new(rules().realm("shop"), work);
    let bank = Api::on(shop.ledger.clone(), rules().realm("bank"), work);
    check(&shop, charge("k"), IdempotencyOutcome::Fresh).await;
    check(&bank, charge("k"), IdempotencyOutcome::Fresh).await;
    check(&shop, charge("k"), IdempotencyOutcome::Replay).await;
    check(&bank, charge("k"), IdempotencyOutcome::Replay).await;
}

// Requests without a caller would share their keys.
#[tokio::test]
async fn a_key_without_a_caller_is_refused() {
    let api = Api::counting(rules());
    let heard = api.send(charge("k").without("x-account-id")).await;
    assert_eq!((heard.status, heard.problem().as_deref()), (400, Some("principal_missing")));
    let claims = Api::counting(
        IdempotencyRules::default().principal(Principal::UnverifiedJwt("sub".into())),
    );
    assert_eq!(claims.send(charge("k")).await.status, 400);
    assert_eq!(api.effects.count() + claims.effects.count(), 0);
    // A request without a key needs no caller.
    assert_eq!(
        api.send(charge("").without("idempotency-key").without("x-account-id")).await.status,
        201
    );
}

#[tokio::test]
async fn by_default_the_authorization_header_keeps_callers_apart() {
    let api = Api::counting(IdempotencyRules::default());
    let of = |token: &str| charge("k").header("authorization", token);
    check(&api, of("Bearer a"), IdempotencyOutcome::Fresh).await;
    check(&api, of("Bearer b"), IdempotencyOutcome::Fresh).await;
    check(&api, charge("k"), IdempotencyOutcome::Fresh).await;
    check(&api, of("Bearer a"), IdempotencyOutcome::Replay).await;
    check(&api, charge("k"), IdempotencyOutcome::Replay).await;
    assert_eq!(api.effects.count(), 3);
}

#[tokio::test]
async fn the_app_itself_may_identify_the_caller() {
    let by_tenant = |parts: &Parts| {
        let host = parts.headers.get("host")?.to_str().ok()?;
        Some(host.split_once('.')?.0.to_owned())
    };
    let api = Api::counting(
        IdempotencyRules::default().principal(Principal::Custom(Arc::new(by_tenant))),
    );
    let of = |host: &str| charge("k").header("host", host);
    check(&api, of("a.example"), IdempotencyOutcome::Fresh).await;
    check(&api, of("b.example"), IdempotencyOutcome::Fresh).await;
    check(&api, of("a.example"), IdempotencyOutcome::Replay).await;
    check(&api, of("nowhere"), IdempotencyOutcome::Refused).await;
}

// Operators read a ledger, and it is backed up: a credential in it would leak.
#[tokio::test]
async fn the_ledger_is_given_no_credential() {
    let setting_cookies = |effects: crate::support::Effects, _| async move {
        effects.add("charged");
        let mut answer = answer(http::StatusCode::OK, "{}");
        answer.headers_mut().insert("set-cookie", "session=s3cret".parse().unwrap());
        Ok(answer)
    };
    let cookie = IdempotencyRules::default().principal(Principal::Header(http::header::COOKIE));
    let token = HeaderName::from_static("x-token");
    let named = IdempotencyRules::default().principal(Principal::Header(token));
    let long = "s3cret".repeat(50);
    for (rules, ask) in [
        (IdempotencyRules::default(), charge("k").header("authorization", "Bearer s3cret")),
        (cookie, charge("k").header("cookie", "session=s3cret")),
        (named, charge("k").header("x-token", &long)),
    ] {
        let api = Api::new(rules, setting_cookies);
        let ask = ask.body("{\"card\":\"s3cret\"}");
        let first = api.send(ask.clone()).await;
        assert_eq!(first.header("set-cookie"), Some("session=s3cret"));
        let replay = api.send(ask).await;
        assert!(replay.is_replay());
        assert_eq!(replay.header("set-cookie"), None);
        let given = api.ledger.given();
        assert!(given.contains("sha256:"), "{given}");
        assert!(!given.contains("s3cret"), "{given}");
    }
}

// One caller's flood of new keys would fill the ledger for all.
#[tokio::test]
async fn a_caller_over_its_quota_gets_no_new_key_and_keeps_its_old_ones() {
    let api = Api::counting(rules().quota(Some(Quota { keys: 2, bytes: 1 << 20 })));
    check(&api, charge("a"), IdempotencyOutcome::Fresh).await;
    check(&api, charge("b"), IdempotencyOutcome::Fresh).await;
    let heard = api.send(charge("c")).await;
    assert_eq!((heard.status, heard.outcome), (429, Some(IdempotencyOutcome::OverQuota)));
    assert_eq!(heard.problem().as_deref(), Some("idempotency_quota"));
    assert_eq!(heard.header("retry-after"), Some("60"));
    check(&api, charge("a"), IdempotencyOutcome::Replay).await;
    check(&api, charge("c").header("x-account-id", "acct_2"), IdempotencyOutcome::Fresh).await;
    assert_eq!(api.effects.count(), 3);
    let free = Api::counting(rules().quota(None));
    for n in 0..10 {
        check(&free, charge(&n.to_string()), IdempotencyOutcome::Fresh).await;
    }
}

// The second request ends after the first one's answer has filled the quota. The work of the second request is
// done and must not run again.
#[tokio::test]
async fn an_answer_that_does_not_fit_reaches_its_caller_and_is_never_run_again() {
    let api =
        Api::new(rules().quota(Some(Quota { keys: 9, bytes: 10 })), |effects, _| async move {
            effects.add("charged");
            Ok(answer(http::StatusCode::OK, "a long answer"))
        });
    let gate = api.ledger.faults.block_answers(Act::Reserve);
    let (one, two) = (api.clone(), api.clone());
    let one = tokio::spawn(async move { one.send(charge("a")).await });
    let two = tokio::spawn(async move { two.send(charge("b")).await });
    while api.ledger.faults.begun(Act::Reserve) < 2 {
        tokio::task::yield_now().await;
    }
    gate.add_permits(100);
    for heard in [one.await.unwrap(), two.await.unwrap()] {
        assert_eq!((heard.status, &heard.body[..]), (200, &b"a long answer"[..]));
    }
    let (one, two) = (api.send(charge("a")).await, api.send(charge("b")).await);
    let mut problems = [one.problem(), two.problem()];
    problems.sort_unstable();
    assert_eq!(problems, [None, Some("answer_not_kept".into())]);
    assert!(one.is_replay() && two.is_replay());
    assert_eq!(api.effects.count(), 2);
}

// An attacker who writes a token would read another caller's answers.
#[tokio::test]
async fn a_token_that_does_not_verify_is_refused_before_anything_is_reserved() {
    let keys = JwtKeys::from_key("a-shared-secret-of-32-bytes-or-more").unwrap();
    let now = || hapax_core::Timestamp::from_second(1_700_000_000).unwrap();
    let principal =
        Principal::Jwt { claim: "sub".into(), keys: Arc::new(keys), now: Arc::new(now) };
    let api = Api::counting(IdempotencyRules::default().principal(principal));
    // {"alg":"HS256"} and {"sub":"u1"}, with an invalid signature.
    let unsigned = "Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ1MSJ9.c2ln";
    for token in ["", unsigned, "Bearer x"] {
        let ask = match token {
            "" => charge("k"),
            token => charge("k").header("authorization", token),
        };
        let heard = api.send(ask).await;
        assert_eq!((heard.status, heard.problem().as_deref()), (401, Some("token_invalid")));
        assert_eq!(heard.header("www-authenticate"), Some("Bearer error=\"invalid_token\""));
    }
    assert_eq!(api.ledger.faults.begun(Act::Reserve), 0);
    assert_eq!(api.effects.count(), 0);
}
