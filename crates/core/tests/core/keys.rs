//! The key of an event differs for distinct events and is equal for copies. Tested with two real updates of one
//! resource for every sender without an event id, and with the samples for all senders.

use std::time::Duration;

use bytes::Bytes;
use hapax_core::envelope::{Envelope, EnvelopeSpec, Identity, Item};
use hapax_core::presets::{self, PresetId};
use hapax_core::sample::{self, SampleId};
use hapax_core::scheme::SignedContent;
use hapax_core::{Arrival, KeyHash, Timestamp};
use http::{HeaderMap, HeaderName, Method};

fn envelope(provider: &str) -> Envelope {
    let preset = presets::find(provider).expect("a preset");
    Envelope::build(Some(&preset.envelope), &EnvelopeSpec::default()).expect("compiles")
}

fn arrival(headers: &[(&str, &str)], content_type: &str, body: &str) -> Arrival {
    let mut all = HeaderMap::new();
    all.insert("content-type", content_type.parse().expect("a value"));
    for (name, value) in headers {
        let name: HeaderName = name.parse().expect("a name");
        all.append(name, value.parse().expect("a value"));
    }
    Arrival {
        method: Method::POST,
        url: "https://hooks.example.com/webhooks/x".into(),
        headers: all,
        body: Bytes::copy_from_slice(body.as_bytes()),
    }
}

fn read(provider: &str, headers: &[(&str, &str)], body: &str) -> Vec<Item> {
    let is_form = !body.starts_with(['{', '[']);
    let content_type =
        if is_form { "application/x-www-form-urlencoded" } else { "application/json" };
    let arrival = arrival(headers, content_type, body);
    envelope(provider).read(&arrival, Some(&signed(&arrival))).expect("reads")
}

/// Stands for the signed content: a hash of the body alone.
fn signed(arrival: &Arrival) -> SignedContent {
    let mut hash = [0; 32];
    hash[..16].copy_from_slice(&KeyHash::of(b"test", [&arrival.body[..]]).0);
    SignedContent::Whole(hash)
}

/// Checks that two updates of one resource are two events, and that a copy of each is the same event.
fn check_updates(provider: &str, first: &str, second: &str) {
    let keys = |body| -> Vec<Identity> {
        read(provider, &[], body).into_iter().map(|item| item.identity).collect()
    };
    assert_ne!(keys(first), keys(second), "{provider}: two updates under one key");
    assert_eq!(keys(first), keys(first), "{provider}");
    assert_eq!(keys(second), keys(second), "{provider}");
    assert!(!keys(first).is_empty(), "{provider}");
}

#[test]
fn two_updates_of_an_adyen_account_holder_are_two_events() {
    let update = |status: &str, time: &str| {
        format!(
            r#"{{"data":{{"balancePlatform":"P","accountHolder":{{"id":"AH1","status":"{status}"}},"id":"AH1"}},"environment":"test","timestamp":"{time}","type":"balancePlatform.accountHolder.updated"}}"#
        )
    };
    let first = update("active", "2026-01-01T00:00:07Z");
    check_updates("adyen_platform", &first, &update("suspended", "2026-01-01T00:09:07Z"));
    check_updates("adyen_platform", &first, &update("active", "2026-01-01T00:09:07Z"));
}

#[test]
fn two_codes_of_one_adyen_payment_are_two_events() {
    let notice = |code: &str, success: &str| {
        format!(
            r#"{{"live":"false","notificationItems":[{{"NotificationRequestItem":{{"amount":{{"currency":"EUR","value":1130}},"pspReference":"PSP1","eventCode":"{code}","eventDate":"2026-01-01T00:00:07Z","merchantAccountCode":"M","merchantReference":"R","success":"{success}"}}}}]}}"#
        )
    };
    let first = notice("AUTHORISATION", "true");
    check_updates("adyen", &first, &notice("CAPTURE", "true"));
    check_updates("adyen", &first, &notice("AUTHORISATION", "false"));
    match &read("adyen", &[], &first)[0].identity {
        Identity::Given(id) => assert!(id.starts_with("PSP1:"), "{id}"),
        Identity::Derived { .. } => panic!("adyen has an id"),
    }
}

#[test]
fn two_updates_of_a_plaid_item_are_two_events() {
    let update = |new: u32| {
        format!(
            r#"{{"webhook_type":"TRANSACTIONS","webhook_code":"DEFAULT_UPDATE","item_id":"item1","new_transactions":{new},"error":null,"environment":"sandbox"}}"#
        )
    };
    check_updates("plaid", &update(3), &update(5));
    let other = r#"{"webhook_type":"ITEM","webhook_code":"ERROR","item_id":"item1"}"#;
    check_updates("plaid", &update(3), other);
}

#[test]
fn two_updates_of_a_lemon_squeezy_subscription_are_two_events() {
    let update = |status: &str, time: &str| {
        format!(
            r#"{{"meta":{{"event_name":"subscription_updated"}},"data":{{"type":"subscriptions","id":"1","attributes":{{"status":"{status}","updated_at":"{time}"}}}}}}"#
        )
    };
    let first = update("active", "2026-01-01T00:00:07.000000Z");
    check_updates("lemonsqueezy", &first, &update("cancelled", "2026-01-01T00:10:07.000000Z"));
    check_updates("lemonsqueezy", &first, &update("active", "2026-01-01T00:10:07.000000Z"));
}

#[test]
fn two_callbacks_of_one_twilio_message_or_call_are_two_events() {
    check_updates(
        "twilio",
        "AccountSid=AC1&From=%2B1&MessageSid=SM1&MessageStatus=sent&SmsSid=SM1&SmsStatus=sent",
        "AccountSid=AC1&From=%2B1&MessageSid=SM1&MessageStatus=delivered&SmsSid=SM1&SmsStatus=delivered",
    );
    check_updates(
        "twilio",
        "CallSid=CA1&CallStatus=ringing&SequenceNumber=1&CallbackSource=call-progress-events",
        "CallSid=CA1&CallStatus=in-progress&SequenceNumber=2&CallbackSource=call-progress-events",
    );
    // Two inputs of one call have the same status.
    check_updates(
        "twilio",
        "CallSid=CA1&CallStatus=in-progress&Digits=1&msg=Gather+End",
        "CallSid=CA1&CallStatus=in-progress&Digits=2&msg=Gather+End",
    );
}

#[test]
fn two_updates_behind_the_same_bytes_are_two_events_after_a_short_span() {
    // These senders only announce a change, with the same bytes every time. Processing a change twice is
    // harmless, but losing one is not. So equal bodies count as one event only for a short time.
    let dropbox = r#"{"list_folder":{"accounts":["dbid:AA"]},"delta":{"users":[1]}}"#;
    let plaid = r#"{"webhook_type":"TRANSACTIONS","webhook_code":"SYNC_UPDATES_AVAILABLE","item_id":"i","environment":"sandbox"}"#;
    for (provider, body) in [("dropbox", dropbox), ("plaid", plaid)] {
        match &read(provider, &[], body)[0].identity {
            Identity::Derived { within: Some(within), .. } => {
                assert!(*within <= Duration::from_secs(3_600), "{provider}: {within:?}");
            }
            other => panic!("{provider}: {other:?}"),
        }
    }
    check_updates("dropbox", dropbox, r#"{"list_folder":{"accounts":["dbid:AB"]}}"#);
}

#[test]
fn two_events_of_one_resource_are_two_events_for_every_other_sender_without_an_id() {
    check_updates(
        "calendly",
        r#"{"created_at":"2026-01-01T00:00:07Z","event":"invitee.created","payload":{"uri":"https://api.calendly.com/x/1"}}"#,
        r#"{"created_at":"2026-01-01T00:00:09Z","event":"invitee.canceled","payload":{"uri":"https://api.calendly.com/x/1"}}"#,
    );
    check_updates(
        "docusign",
        r#"{"event":"envelope-sent","generatedDateTime":"2026-01-01T00:00:07.0000000Z","retryCount":0,"data":{"envelopeId":"e1"}}"#,
        r#"{"event":"envelope-completed","generatedDateTime":"2026-01-01T00:05:07.0000000Z","retryCount":0,"data":{"envelopeId":"e1"}}"#,
    );
    check_updates(
        "xero",
        r#"{"events":[{"resourceId":"r1","tenantId":"t","eventCategory":"INVOICE","eventType":"UPDATE","eventDateUtc":"2026-01-01T00:00:07.1"}],"firstEventSequence":1,"lastEventSequence":1,"entropy":"a"}"#,
        r#"{"events":[{"resourceId":"r1","tenantId":"t","eventCategory":"INVOICE","eventType":"UPDATE","eventDateUtc":"2026-01-01T00:00:09.1"}],"firstEventSequence":2,"lastEventSequence":2,"entropy":"b"}"#,
    );
    check_updates(
        "pusher",
        r#"{"time_ms":1767225607000,"events":[{"name":"channel_occupied","channel":"c"}]}"#,
        r#"{"time_ms":1767225608000,"events":[{"name":"channel_occupied","channel":"c"}]}"#,
    );
    check_updates(
        "zoom",
        r#"{"event":"meeting.started","event_ts":1767225607000,"payload":{"object":{"uuid":"u","id":"1"}}}"#,
        r#"{"event":"meeting.started","event_ts":1767225609000,"payload":{"object":{"uuid":"u","id":"1"}}}"#,
    );
    // Two participants join one meeting in the same millisecond.
    check_updates(
        "zoom",
        r#"{"event":"meeting.participant_joined","event_ts":1767225607000,"payload":{"object":{"uuid":"u","participant":{"user_id":"1"}}}}"#,
        r#"{"event":"meeting.participant_joined","event_ts":1767225607000,"payload":{"object":{"uuid":"u","participant":{"user_id":"2"}}}}"#,
    );
    check_updates(
        "paystack",
        r#"{"event":"charge.success","data":{"id":1,"status":"success","reference":"r"}}"#,
        r#"{"event":"charge.dispute.create","data":{"id":1,"status":"awaiting","reference":"r"}}"#,
    );
    let refund = |transaction: &str, amount: u32| {
        format!(
            r#"{{"event":"refund.processed","data":{{"status":"processed","transaction_reference":"{transaction}","refund_reference":null,"amount":"{amount}","currency":"NGN","domain":"live"}}}}"#
        )
    };
    check_updates("paystack", &refund("T1", 5000), &refund("T2", 5000));
    check_updates("paystack", &refund("T1", 5000), &refund("T1", 2000));
    check_updates(
        "paystack",
        r#"{"event":"customeridentification.success","data":{"customer_id":1,"customer_code":"CUS_1"}}"#,
        r#"{"event":"customeridentification.success","data":{"customer_id":2,"customer_code":"CUS_2"}}"#,
    );
    check_updates(
        "paystack",
        r#"{"event":"invoice.update","data":{"invoice_code":"INV_1","status":"success","paid_at":"2026-01-01T00:00:07.000Z","created_at":"2026-01-01T00:00:06.000Z"}}"#,
        r#"{"event":"invoice.update","data":{"invoice_code":"INV_2","status":"success","paid_at":"2026-01-01T00:00:07.000Z","created_at":"2026-01-01T00:00:06.000Z"}}"#,
    );
    check_updates(
        "flutterwave",
        r#"{"event":"charge.completed","data":{"id":285959875,"status":"pending"}}"#,
        r#"{"event":"charge.completed","data":{"id":285959875,"status":"successful"}}"#,
    );
    check_updates(
        "postmark",
        r#"{"RecordType":"Open","MessageID":"m1","Recipient":"a@example.com","ReceivedAt":"2026-01-01T00:00:07Z"}"#,
        r#"{"RecordType":"Open","MessageID":"m1","Recipient":"a@example.com","ReceivedAt":"2026-01-01T00:01:07Z"}"#,
    );
    check_updates(
        "postmark",
        r#"{"RecordType":"Delivery","MessageID":"m1","Recipient":"a@example.com","DeliveredAt":"2026-01-01T00:00:07Z"}"#,
        r#"{"RecordType":"Delivery","MessageID":"m1","Recipient":"b@example.com","DeliveredAt":"2026-01-01T00:00:07Z"}"#,
    );
    check_updates(
        "plivo",
        "From=1&MessageUUID=m1&Status=sent&To=2",
        "From=1&MessageUUID=m1&Status=delivered&To=2",
    );
    check_updates(
        "x",
        r#"{"for_user_id":"1","favorite_events":[{"id":"f1","created_at":"a"}]}"#,
        r#"{"for_user_id":"1","favorite_events":[{"id":"f2","created_at":"a"}]}"#,
    );
    check_updates(
        "hubspot",
        r#"[{"eventId":1,"subscriptionId":1,"portalId":2,"occurredAt":1767225607000,"subscriptionType":"contact.creation","attemptNumber":0,"objectId":3}]"#,
        r#"[{"eventId":1,"subscriptionId":2,"portalId":2,"occurredAt":1767225607000,"subscriptionType":"contact.creation","attemptNumber":0,"objectId":3}]"#,
    );
}

#[test]
fn two_updates_of_an_adyen_merchant_are_two_events() {
    // Webhooks of the Management API have neither a timestamp nor an id at /data/id.
    let update = |merchant: &str, at: &str| {
        format!(
            r#"{{"createdAt":"{at}","data":{{"merchantId":"{merchant}","legalEntityId":"LE1","status":"PreActive","capabilities":{{}}}},"environment":"test","type":"merchant.updated"}}"#
        )
    };
    let first = update("M1", "2026-01-01T00:00:07+01:00");
    check_updates("adyen_platform", &first, &update("M1", "2026-01-01T00:00:09+01:00"));
    check_updates("adyen_platform", &first, &update("M2", "2026-01-01T00:00:07+01:00"));
}

#[test]
fn two_events_of_a_shop_in_one_second_are_two_events() {
    // WooCommerce makes the delivery id from the number of the webhook and the second.
    let identity = |id: &str, body: &str| {
        let headers = [("x-wc-webhook-delivery-id", id), ("x-wc-webhook-topic", "order.created")];
        read("woocommerce", &headers, body)[0].identity.clone()
    };
    let (first, second) =
        (r#"{"id":727,"status":"processing"}"#, r#"{"id":728,"status":"processing"}"#);
    assert_eq!(identity("d1", first), identity("d1", first));
    assert_ne!(identity("d1", first), identity("d1", second));
    assert_ne!(identity("d1", first), identity("d2", first));
    assert!(matches!(identity("d1", first), Identity::Given(id) if id.starts_with("d1:")));
}

#[test]
fn the_ping_of_intercom_is_an_event_although_its_id_is_null() {
    let ping = |at: u32| {
        format!(
            r#"{{"type":"notification_event","data":{{"item":{{"type":"ping"}}}},"id":null,"topic":"ping","created_at":{at}}}"#
        )
    };
    check_updates("intercom", &ping(1_513_173_200), &ping(1_513_173_201));
    let event = r#"{"type":"notification_event","id":"notif_1","topic":"user.created"}"#;
    assert_eq!(read("intercom", &[], event)[0].identity, Identity::Given("notif_1".into()));
}

#[test]
fn an_attempt_number_does_not_make_another_event() {
    let hubspot = |attempt: u32| {
        format!(
            r#"[{{"eventId":1,"subscriptionId":1,"portalId":2,"occurredAt":1767225607000,"subscriptionType":"contact.creation","attemptNumber":{attempt},"objectId":3}}]"#
        )
    };
    let identity = |body: &str| read("hubspot", &[], body)[0].identity.clone();
    assert_eq!(identity(&hubspot(0)), identity(&hubspot(1)));
    let docusign = |retry: u32| {
        format!(
            r#"{{"event":"envelope-sent","generatedDateTime":"2026-01-01T00:00:07Z","retryCount":{retry},"data":{{"envelopeId":"e1"}}}}"#
        )
    };
    let identity = |body: &str| read("docusign", &[], body)[0].identity.clone();
    assert_eq!(identity(&docusign(0)), identity(&docusign(1)));
}

#[test]
fn every_kind_of_entry_that_meta_sends_is_an_event() {
    let change = r#"{"object":"page","entry":[{"id":"1","time":1767225607,"changes":[{"field":"feed","value":{"post_id":"p1"}}]}]}"#;
    let later = r#"{"object":"page","entry":[{"id":"1","time":1767225609,"changes":[{"field":"feed","value":{"post_id":"p1"}}]}]}"#;
    let message = r#"{"object":"page","entry":[{"id":"1","time":1767225607,"messaging":[{"sender":{"id":"2"},"timestamp":1767225607000,"message":{"mid":"m1","text":"hi"}}]}]}"#;
    check_updates("meta", change, later);
    check_updates("meta", change, message);
}

#[test]
fn the_same_element_in_another_batch_is_the_same_event() {
    let cases = [
        (
            "sendgrid",
            "[",
            "]",
            r#"{"sg_event_id":"a","event":"open","timestamp":1}"#,
            r#"{"sg_event_id":"b","event":"open","timestamp":1}"#,
        ),
        (
            "line",
            r#"{"destination":"U","events":["#,
            "]}",
            r#"{"type":"message","webhookEventId":"a"}"#,
            r#"{"type":"message","webhookEventId":"b"}"#,
        ),
        (
            "gocardless",
            r#"{"events":["#,
            r#"],"meta":{"webhook_id":"W"}}"#,
            r#"{"id":"a","resource_type":"payments","action":"paid"}"#,
            r#"{"id":"b","resource_type":"payments","action":"paid"}"#,
        ),
        (
            "xero",
            r#"{"events":["#,
            r#"],"entropy":"e"}"#,
            r#"{"resourceId":"a","tenantId":"t","eventCategory":"INVOICE","eventType":"UPDATE","eventDateUtc":"2026-01-01T00:00:07"}"#,
            r#"{"resourceId":"b","tenantId":"t","eventCategory":"INVOICE","eventType":"UPDATE","eventDateUtc":"2026-01-01T00:00:07"}"#,
        ),
    ];
    for (provider, before, after, a, b) in cases {
        let alone = read(provider, &[], &format!("{before}{a}{after}"));
        let both = read(provider, &[], &format!("{before}{b},{a}{after}"));
        assert_eq!((alone.len(), both.len()), (1, 2), "{provider}");
        assert_eq!(alone[0].identity, both[1].identity, "{provider}");
        assert_ne!(both[0].identity, both[1].identity, "{provider}");
    }
}

#[test]
fn the_sample_of_every_preset_is_one_event_with_its_own_key() {
    let at = Timestamp::from_second(1_767_225_600).expect("in range");
    for preset in presets::all() {
        let provider = preset.name;
        let make = |id: &SampleId| {
            let sample = sample::event(provider, None, id).expect("a sample");
            let headers: Vec<(&str, &str)> =
                sample.headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
            let arrival = arrival(&headers, sample.content_type, &sample.body);
            let envelope = envelope(provider);
            assert!(envelope.content_type_fits(Some(sample.content_type)), "{provider}");
            let mut items = envelope
                .read(&arrival, Some(&signed(&arrival)))
                .unwrap_or_else(|e| panic!("{provider}: {e}"));
            assert_eq!(items.len(), 1, "{provider}");
            items.remove(0)
        };
        let first = make(&SampleId::made_up("a1", at));
        assert_eq!(first.identity, make(&SampleId::made_up("a1", at)).identity, "{provider}");
        assert_ne!(first.identity, make(&SampleId::made_up("a2", at)).identity, "{provider}");
        let exact = make(&SampleId::exact("1234567", at));
        match (&exact.identity, &preset.envelope.id) {
            (Identity::Given(id), PresetId::Joined(_)) => {
                assert!(id.split(':').any(|part| part == "1234567"), "{provider}: {id}");
            }
            (Identity::Given(id), _) => assert_eq!(&**id, "1234567", "{provider}"),
            (Identity::Derived { .. }, _) => {}
        }
        if !preset.envelope.event_type.is_empty() {
            assert!(first.event_type.is_some(), "{provider} has a type");
        }
    }
}
