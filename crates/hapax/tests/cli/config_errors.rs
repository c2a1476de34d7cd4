//! Bad configs through the real binary. Each must exit with 2, name the file, the line and the key, give the
//! problem and a hint, and never show a secret.

use crate::common::{Run, hapax, write};

/// A literal secret in every config below, which must never be printed.
const SECRET: &str = "s3cr3t-hunter2-never-print-me";

fn check_config(text: &str) -> Run {
    let dir = tempfile::tempdir().unwrap();
    let file = write(&dir, "hapax.toml", text);
    hapax(&["check-config", "--config", &file]).env("EMPTY", "").env("FULL", SECRET).run()
}

/// Expects an error at the line with `¶`; the mark itself is removed.
fn refused(marked: &str, parts: &[&str]) {
    let before = marked.split('¶').next().unwrap();
    let line = before.matches('\n').count() + 1;
    let run = check_config(&marked.replace('¶', ""));
    assert_eq!(run.code, 2, "{marked}\n{run:?}");
    let place = format!("hapax.toml:{line}:");
    let errors = format!("\n{}", run.stderr);
    let about = errors
        .split("\nerror: ")
        .find(|error| error.contains(&place) && parts.iter().all(|part| error.contains(part)));
    assert!(about.is_some(), "wanted {place} with {parts:?}\n{marked}\n{}", run.stderr);
    assert!(!run.stderr.contains(SECRET) && !run.stdout.contains(SECRET), "{run:?}");
    assert!(!run.stderr.contains("hunter2"), "{run:?}");
}

/// A valid source, plus the lines of `rest`.
fn custom(rest: &str) -> String {
    format!(
        "[sources.legacy]\nprovider = \"custom\"\nevent_id = \"/id\"\n\
         scheme = {{ header = \"x-signature\" }}\n{rest}"
    )
}

#[test]
fn unknown_keys_name_their_line_and_the_key_that_was_meant() {
    refused("¶lisen = \"127.0.0.1:1\"", &["lisen", "unknown key", "hint: did you mean `listen`?"]);
    refused("\n[log]\n¶formt = \"json\"", &["log.formt", "unknown key", "`format`"]);
    refused(
        "[sources.a]\nprovider = \"custom\"\n¶tolerence = \"5m\"",
        &["sources.a.tolerence", "unknown key", "`tolerance`"],
    );
    refused("[alerts]\n¶silense = \"1h\"", &["alerts.silense", "unknown key", "`silence`"]);
    refused(
        "[alerts]\n¶oldest_job = \"soon\"",
        &["alerts.oldest_job", "not a duration", "\"off\""],
    );
    refused("[alerts]\n¶dead_letters = 0", &["alerts.dead_letters", "above zero", "\"off\""]);
    refused("[alerts]\n¶duplicate_spike = 1", &["alerts.duplicate_spike", "above one"]);
    refused("[alerts]\n¶store = true", &["alerts.store", "wrong type"]);
    refused(
        "[retention]\n¶colour = 1",
        &["retention.colour", "known keys: keys, events, deliveries"],
    );
    refused(
        &custom(
            "secrets = [\n  \"x\",\n  { value = \"y\", ¶untill = \"2026-12-01T00:00:00Z\" },\n]",
        ),
        &["untill", "unknown key", "`until`"],
    );
    refused(
        &custom("secrets = [\"x\"]\n[sources.legacy.tenants.acme]\n¶secret = [\"y\"]"),
        &["sources.legacy.tenants.acme.secret", "`secrets`"],
    );
}

#[test]
fn a_portal_that_cannot_be_reached_is_refused_with_its_line() {
    refused("[portal]\n¶listn = \"127.0.0.1:8082\"", &["portal.listn", "`listen`"]);
    refused("[portal]\n¶listen = \"127.0.0.1:8081\"", &["portal.listen", "`admin_listen`"]);
    refused(
        "¶[portal]\nlisten = \"0.0.0.0:8082\"",
        &["portal", "public_url", "https://webhooks.example.com"],
    );
    refused("[portal]\n¶public_url = \"webhooks.example.com\"", &["portal.public_url", "http://"]);
    refused("[portal]\n¶tls = { cert = \"a.pem\" }", &["portal.tls", "has no key"]);
}

#[test]
fn a_vault_key_that_cannot_be_used_is_refused_with_its_line_and_how_to_make_one() {
    // SECRET is neither base64 nor 32 bytes, and must not be printed in any of these.
    let key = |letter: &str| format!("{}A=", letter.repeat(42));
    let make = "openssl rand -base64 32";
    let (a, b) = (key("A"), key("B"));
    refused(&format!("[vault]\n¶key = \"{SECRET}\""), &["vault.key", "is not base64", make]);
    refused("[vault]\n¶key = \"env:FULL\"", &["vault.key", "is not base64", make]);
    refused("[vault]\n¶key = \"env:UNSET_KEY\"", &["vault.key", "UNSET_KEY is not set", "hint:"]);
    refused("[vault]\n¶key = \"env:EMPTY\"", &["vault.key", "is empty"]);
    refused("[vault]\n¶key = \"file:/nowhere/key\"", &["cannot read /nowhere/key"]);
    refused("[vault]\n¶key = \"aHVudGVyMg==\"", &["holds 7 bytes", "has 32", make]);
    refused(&format!("[vault]\n¶key = \"AAAA{a}\""), &["holds 35 bytes", make]);
    refused("[vault]\n¶key = 5", &["vault.key", "wrong type"]);
    refused(&format!("[vault]\n¶old = \"{a}\""), &["vault.old", "wrong type", "list"]);
    refused("[vault]\nold = [\n¶\"aHVudGVyMg==\"]", &["vault.old", "holds 7 bytes", make]);
    refused(&format!("[vault]\nkey = \"{a}\"\nold = [\n¶\"{a}\"]"), &["same as `key`", "hint:"]);
    let twice = format!("[vault]\nkey = \"{a}\"\nold = [\"{b}\",\n¶\"{b}\"]");
    refused(&twice, &["vault.old", "listed twice"]);
    refused("[vault]\n¶keys = []", &["vault.keys", "unknown key", "did you mean `key`?"]);
    refused(
        &format!("database_url = \"postgres://h/db\"\n[vault]\n¶old = [\"{b}\"]"),
        &["vault.old", "needs `key`", "every node", make],
    );
}

#[test]
fn outbound_settings_that_cannot_work_are_refused_with_their_line() {
    // Ports and nets that do not exist, a proxy that would not be used as written, and bounds of zero.
    let outbound = |rest: &str| format!("[outbound]\n{rest}");
    let refused = |rest: &str, parts: &[&str]| self::refused(&outbound(rest), parts);
    refused("¶alow = []", &["outbound.alow", "did you mean `allow`?"]);
    refused("¶allow = \"10.0.0.0/8\"", &["outbound.allow", "wrong type", "list"]);
    refused("allow = [\"10.0.0.0/8\",\n¶\"10.0.0.0/33\"]", &["outbound.allow", "not a network"]);
    refused("¶ports = 443", &["outbound.ports", "wrong type", "list"]);
    for bad in ["0", "-1", "65536", "\"https\""] {
        refused(&format!("ports = [443,\n¶{bad}]"), &["outbound.ports", "is not a port", "65535"]);
    }
    refused("¶ports = []", &["outbound.ports", "no endpoint could be reached"]);
    for (bad, problem) in [
        ("egress:3128", "must begin with http://"),
        ("https://egress:3128", "must begin with http://"),
        ("http://egress", "names no port"),
        ("http://egress:0", "names no port"),
        ("http://u:hunter2@egress:3128", "must not contain a user name or a password"),
        ("http://egress:3128/path", "neither path nor query"),
        ("http://egress:3128/?q=1", "neither path nor query"),
        ("http://a b:1", "is not a URL"),
    ] {
        refused(&format!("¶proxy = \"{bad}\""), &["outbound.proxy", problem, "hint: write"]);
    }
    for bad in ["0", "-5", "16385", "\"many\""] {
        refused(&format!("¶max_in_flight = {bad}"), &["outbound.max_in_flight", "1 to 16384"]);
    }
    refused("¶max_in_flight_bytes = \"1MiB\"", &["outbound.max_in_flight_bytes", "2MiB"]);
    refused("¶max_in_flight_bytes = \"lots\"", &["outbound.max_in_flight_bytes", "not a size"]);
    self::refused("[retention]\n¶deliveries = \"0s\"", &["retention.deliveries", "forever"]);
}

/// A valid proxy, plus the lines of `rest`.
fn proxy(rest: &str) -> String {
    format!(
        "[proxies.api]\nlisten = \"127.0.0.1:8090\"\nupstream = \"http://127.0.0.1:3000\"\n{rest}"
    )
}

#[test]
fn a_proxy_that_cannot_work_is_refused_with_its_line() {
    refused("[proxies.¶api]\nupstream = \"http://a\"", &["proxies.api", "has no listen", "8090"]);
    refused("[proxies.¶api]\nlisten = \"127.0.0.1:1\"", &["proxies.api", "has no upstream"]);
    refused("[proxies.¶\"a b\"]\nlisten = \"127.0.0.1:1\"", &["is not a valid name"]);
    refused("[proxies]\n¶api = 5", &["proxies.api", "wrong type"]);
    refused(&proxy("¶require_keys = []"), &["proxies.api.require_keys", "did you mean"]);
    for bad in ["127.0.0.1:3000", "ftp://a", "http://u:p@a", "http://a/?b=1", "http://a/../b"] {
        let text = format!("[proxies.api]\nlisten = \"127.0.0.1:1\"\n¶upstream = \"{bad}\"");
        refused(&text, &["proxies.api.upstream", "hint: write the URL of your app"]);
    }
    refused(
        "[proxies.api]\nlisten = \"127.0.0.1:1\"\n¶upstream = \"http://127.0.0.1:1\"",
        &["is the address of this proxy"],
    );
    refused(&proxy("¶require_key = \"POST /charges\""), &["wrong type", "list"]);
    refused(&proxy("require_key = [\n¶\"/charges\"]"), &["a method and a path", "POST /charges"]);
    refused(&proxy("require_key = [¶\"GET /charges\"]"), &["never need a key"]);
    refused(&proxy("¶scope = \"sub\""), &["is not a scope", "jwt:sub"]);
    refused(&proxy("¶scope = \"header:idempotency-key\""), &["does not identify the caller"]);
    refused(
        &proxy("¶scope = \"jwt:sub\""),
        &["the token is not verified", "jwks =", "jwt-unverified:sub"],
    );
    let jwt = |keys: &str| proxy(&format!("scope = \"jwt:sub\"\n{keys}"));
    refused(&jwt("¶jwt_key = \"hunter2\""), &["fewer than 32 bytes", "hint:"]);
    refused(&jwt("¶jwks = \"hunter2\""), &["is not a JWK set", "hint:"]);
    refused(&jwt("¶jwks = \"{\\\"keys\\\":[]}\""), &["holds no key"]);
    refused(&jwt("¶jwks = \"file:/nowhere/jwks.json\""), &["cannot read /nowhere/jwks.json"]);
    refused(&jwt("jwks = \"{}\"\n¶jwt_key = \"x\""), &["cannot be combined with jwks"]);
    let secret = "s".repeat(32);
    refused(&proxy(&format!("scope = \"none\"\n¶jwt_key = \"{secret}\"")), &["has no effect"]);
    refused(&proxy("¶max_keys = 0"), &["proxies.api.max_keys", "not a number of keys"]);
    refused(&proxy("¶max_bytes = \"lots\""), &["proxies.api.max_bytes", "not a size"]);
    refused(&proxy("¶ttl = \"0s\""), &["proxies.api.ttl", "1s and 10 years"]);
    refused(&proxy("¶ttl = \"20000d\""), &["proxies.api.ttl", "1s and 10 years"]);
    refused(&proxy("¶ttl = \"forever\""), &["proxies.api.ttl", "not a duration"]);
    refused(&proxy("¶ttl = \"30s\""), &["ttl is shorter than the lease"]);
    refused(&proxy("¶lease = \"100h\""), &["proxies.api.lease"]);
    refused(&proxy("¶lease = \"10ms\""), &["proxies.api.lease", "1s and 1d"]);
    refused(&proxy("¶wait = \"60s\""), &["wait is not shorter than the lease"]);
    refused(&proxy("¶mismatch_status = 400"), &["mismatch_status", "409, or 422"]);
    refused(&proxy("fingerprint_ignore = [¶\"client_ts\"]"), &["JSON pointer"]);
    refused(&proxy("fingerprint_ignore = [¶\"\"]"), &["the whole body"]);
    let many = vec!["\"/a\""; 65].join(", ");
    refused(&proxy(&format!("¶fingerprint_ignore = [{many}]")), &["65 pointers are more than 64"]);
}

#[test]
fn two_listeners_on_one_address_are_refused() {
    let text = format!("listen = \"127.0.0.1:8090\"\n{}", proxy(""));
    refused(&text.replacen("]\nlisten", "]\n¶listen", 1), &["is used by `listen`", "hint:"]);
    let text = format!("admin_listen = \"127.0.0.1:8090\"\n{}", proxy(""));
    refused(&text.replacen("]\nlisten", "]\n¶listen", 1), &["is used by `admin_listen`"]);
    refused(
        &proxy("[proxies.b]\n¶listen = \"0.0.0.0:8090\"\nupstream = \"http://127.0.0.1:1\""),
        &["proxies.b.listen", "is used by `proxies.api.listen`"],
    );
}

#[test]
fn wrong_types_and_values_are_named_without_showing_a_secret() {
    refused("¶listen = 8080", &["listen", "wrong type", "found an integer"]);
    refused("¶listen = \"8080\"", &["listen", "not an address", "hint: write IP:PORT"]);
    refused("\n\n¶drain = \"5 minutes\"", &["drain", "\"5 minutes\" is not a duration", "hint:"]);
    refused("¶drain = 30", &["drain", "wrong type"]);
    refused("¶max_body = \"1 Megabyte\"", &["max_body", "not a size"]);
    refused("¶max_body = true", &["max_body", "wrong type"]);
    refused("¶max_connections = 0", &["max_connections", "not a number above zero"]);
    refused("trusted_proxies = [\"10.0.0.0/8\",\n¶\"nonsense\"]", &["trusted_proxies", "network"]);
    refused("¶public_url = \"hooks.example.com\"", &["public_url", "http:// or https://"]);
    refused("[log]\n¶level = \"loud\"", &["log.level", "not a log level"]);
    refused("[log]\n¶format = \"xml\"", &["log.format", "\"human\" or \"json\""]);
    refused("[retention]\n¶keys = \"0s\"", &["retention.keys", "longer than zero"]);
    refused("[retention]\n¶events = \"ever\"", &["retention.events", "\"forever\""]);
    refused("¶log = \"json\"", &["log", "wrong type", "a table"]);
    refused(&custom(&format!("¶secrets = \"{SECRET}\"")), &["secrets", "wrong type", "list"]);
    refused(&custom("secrets = [\n¶5]"), &["secrets", "wrong type"]);
    refused(&custom(&format!("¶secrets = {{ value = \"{SECRET}\" }}")), &["wrong type"]);
    refused(&custom("secrets = [\"x\"]\n¶late = \"maybe\""), &["late", "\"reject\" or \"review\""]);
    refused(&custom("secrets = [\"x\"]\n¶replay_guard = \"on\""), &["\"signed\" or \"off\""]);
    refused(&custom("secrets = [\"x\"]\n¶rate_limit = \"fast\""), &["not a rate", "100/s"]);
    refused(&custom("secrets = [\"x\"]\n¶unverified_limit = 5"), &["wrong type"]);
    refused(&custom("secrets = [\"x\"]\n¶tolerance = \"0s\""), &["longer than zero"]);
    refused(&custom("secrets = [\"x\"]\n¶mode = \"fast\""), &["is not a mode"]);
    refused(
        &custom("secrets = [{ value = \"x\", ¶until = \"tomorrow\" }]"),
        &["until", "not a time", "RFC 3339"],
    );
}

#[test]
fn a_file_that_is_not_toml_is_refused_by_line_without_its_text() {
    refused(&format!("listen = \"127.0.0.1:1\"\nsecrets = [\"{SECRET}\", ¶"), &["hint:"]);
    refused(&format!("a = 1\nsecret = ¶{SECRET}"), &["hint:"]);
    refused("drain = \"1s\"\n¶drain = \"2s\"", &["duplicate"]);
    refused("[sources.a]\nprovider = \"custom\"\n[¶sources.a]", &["duplicate"]);
}

#[test]
fn secrets_that_cannot_be_read_are_refused_at_start() {
    refused(&custom("secrets = [¶\"env:NOT_SET_ANYWHERE\"]"), &["NOT_SET_ANYWHERE is not set"]);
    refused(&custom("secrets = [¶\"env:EMPTY\"]"), &["is empty", "anyone could sign"]);
    refused(&custom("secrets = [\"x\",\n ¶\"\"]"), &["secrets", "is empty"]);
    refused(&custom("secrets = [¶\"  \"]"), &["is empty"]);
    refused(&custom("secrets = [¶\"file:/no/such/file\"]"), &["cannot read /no/such/file"]);
    refused(&custom("secrets = [¶\"env:hunter2-is the secret\"]"), &["not the name"]);
    refused(&custom("secrets = [¶{ until = \"2026-12-01T00:00:00Z\" }]"), &["has no value"]);
    refused(
        "[sources.a]\nprovider = \"pusher\"\nsecrets = [\"x\"]\nparams = { ¶key = \"env:NOT_SET_ANYWHERE\" }",
        &["sources.a.params.key", "is not set"],
    );
}

#[test]
fn no_secret_is_used_twice() {
    refused(
        &custom(&format!("secrets = [\"{SECRET}\",\n ¶\"env:FULL\"]")),
        &["sources.legacy.secrets", "the same secret twice"],
    );
    refused(
        &custom(&format!(
            "secrets = [\"{SECRET}\"]\n[sources.legacy.tenants.acme]\nsecrets = [¶\"env:FULL\"]"
        )),
        &["tenants.acme.secrets", "shares a secret with legacy"],
    );
    let other = "[sources.a]\nprovider = \"custom\"\nevent_id = \"/id\"\n\
                 scheme = { header = \"x\" }\nsecrets = [\"env:FULL\"]\n";
    refused(
        &format!("{other}{}", custom(&format!("secrets = [¶\"{SECRET}\"]"))),
        &["sources.legacy.secrets", "shares a secret with a"],
    );
}

#[test]
fn a_secret_that_is_written_in_another_way_is_the_same_secret() {
    let two = |provider: &str, one: &str, other: &str| {
        let text = format!(
            "[sources.a]\nprovider = \"{provider}\"\n[sources.a.tenants.acme]\nsecrets = [\"{one}\"]\n\
             [sources.a.tenants.bolt]\nsecrets = [¶\"{other}\"]"
        );
        refused(&text, &["tenants.bolt.secrets", "shares a secret with acme/a"]);
    };
    let key = "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLawA";
    two("standardwebhooks", &format!("whsec_{key}"), key);
    two("svix", key, &format!("whsec_{key}"));
    two("brex", "c2VjcmV0IG9mIGJyZXg=", "c2VjcmV0IG9mIGJyZXg");
    two("adyen", "44782def547aaa06", "44782DEF547AAA06");
    two("woocommerce", "tom & jerry", "tom &amp; jerry");
    two("github", "secret", "secret\\u0000");
    refused(
        &format!(
            "[sources.a]\nprovider = \"standardwebhooks\"\nsecrets = [\"whsec_{key}\",\n ¶\"{key}\"]"
        ),
        &["sources.a.secrets", "the same secret twice"],
    );
}

#[test]
fn no_webhook_id_of_paypal_is_used_twice() {
    // PayPal signs the webhook's id and nothing else that identifies a pair.
    let of = |tenants: &str| format!("[sources.a]\nprovider = \"paypal\"\n{tenants}");
    refused(
        &of("tenants.acme = { params = { webhook_id = \"W\" } }\n\
             tenants.bolt = { params = { ¶webhook_id = \"W\" } }"),
        &["tenants.bolt.params.webhook_id", "shares its webhook_id with acme/a"],
    );
    refused(
        &of("params = { webhook_id = \"W\" }\ntenants.acme = {}\n¶tenants.bolt = {}"),
        &["tenants.bolt", "shares its webhook_id with acme/a"],
    );
    refused(
        &of("params = { webhook_id = \"W\" }\n\
             [sources.b]\nprovider = \"paypal\"\n¶secrets = [\"W\"]"),
        &["sources.b.secrets", "shares a secret with a"],
    );
}

#[test]
fn the_value_that_decides_the_tenant_must_be_signed() {
    let stripe =
        |more: &str| format!("[sources.a]\nprovider = \"stripe\"\nsecrets = [\"x\"]\n{more}");
    for from in ["header:x-account", "query:account"] {
        refused(&stripe(&format!("¶tenant_from = \"{from}\"")), &["tenant_from", "does not sign"]);
        refused(&stripe(&format!("¶event_type = \"{from}\"")), &["event_type", "does not sign"]);
        refused(
            &custom(&format!("secrets = [\"x\"]\n¶tenant_from = \"{from}\"")),
            &["does not sign"],
        );
        refused(
            &custom(&format!("secrets = [\"x\"]\n¶event_type = \"{from}\"")),
            &["does not sign"],
        );
    }
    let gitlab = "[sources.a]\nprovider = \"gitlab\"\nsecrets = [\"a token of gitlab\"]\n";
    refused(&format!("{gitlab}¶tenant_from = \"/project\""), &["tenant_from", "does not sign"]);
    refused(&format!("{gitlab}¶replay_guard = \"signed\""), &["replay_guard", "signs nothing"]);
}

#[test]
fn keys_and_tokens_that_prove_nothing_are_refused() {
    refused(
        "[sources.a]\nprovider = \"gitlab\"\n¶secrets = [\"fifteen-letters\"]",
        &["secrets", "16 characters", "hint:"],
    );
    let zero = "00".repeat(32);
    refused(
        &format!("[sources.a]\nprovider = \"discord\"\n¶secrets = [\"{zero}\"]"),
        &["secrets", "small order"],
    );
}

#[test]
fn sources_and_tenants_need_usable_names_and_a_known_provider() {
    refused(
        "[sources.¶\"a/b\"]\nprovider = \"stripe\"",
        &["is not a valid name", "part of the URL"],
    );
    refused("[sources.¶\"..\"]\nprovider = \"stripe\"", &["is not a valid name"]);
    refused(
        &custom("[sources.legacy.tenants.¶\"a b\"]\nsecrets = [\"x\"]"),
        &["is not a valid name"],
    );
    refused(
        &custom("[sources.legacy.tenants.¶hapax]\nsecrets = [\"x\"]"),
        &["reserved for messages of Hapax itself", "another name"],
    );
    refused(
        &custom("secrets = [\"x\"]\n[sources.legacy.tenants.¶default]\nsecrets = [\"y\"]"),
        &["declared twice"],
    );
    refused(
        &custom("¶tenant_from = \"/account\"\n[sources.legacy.tenants.acme]\nsecrets = [\"x\"]"),
        &["tenant_from", "combined with [tenants]"],
    );
    refused("[sources.¶a]\nsecrets = [\"x\"]", &["sources.a", "has no provider"]);
    refused(
        "[sources.a]\n¶provider = \"strpie\"\nsecrets = [\"x\"]",
        &["provider", "unknown provider \"strpie\"", "hint:"],
    );
    refused(
        "[sources.¶a]\nprovider = \"custom\"\nsecrets = [\"x\"]",
        &["provider = \"custom\" needs [sources.NAME.scheme]"],
    );
}

#[test]
fn a_missing_parameter_of_a_sender_is_named() {
    refused(
        "[sources.a]\n¶provider = \"square\"\nsecrets = [\"x\"]",
        &["signs the full URL", "public_url"],
    );
    refused("[sources.¶a]\nprovider = \"pusher\"\nsecrets = [\"x\"]", &["key", "hint:"]);
    refused("[sources.¶a]\nprovider = \"stripe\"", &["sources.a", "secret", "hint:"]);
    refused(
        "[sources.a]\nprovider = \"pusher\"\nsecrets = [\"x\"]\nparams = { key = \"k\", ¶keyy = \"k\" }",
        &["sources.a.params.keyy", "unknown key", "did you mean `key`?"],
    );
    refused(
        "[sources.a]\nprovider = \"stripe\"\nsecrets = [\"x\"]\nparams = { ¶key = \"k\" }",
        &["sources.a.params.key", "this section has no keys"],
    );
    refused(
        &format!("[sources.a]\nprovider = \"liveblocks\"\n¶secrets = [\"{SECRET}\"]"),
        &["sources.a.secrets", "hint:"],
    );
    refused(
        "[sources.a]\nprovider = \"stripe\"\nsecrets = [\"x\"]\n¶event_id = \"id\"",
        &["sources.a.event_id", "hint:"],
    );
    refused(
        "[retention]\nkeys = \"1m\"\n[sources.¶a]\nprovider = \"stripe\"\nsecrets = [\"x\"]",
        &["retention.keys is shorter than the replay window"],
    );
}

#[test]
fn the_admin_side_is_never_open_to_the_network_without_a_token() {
    refused("¶admin_listen = \"0.0.0.0:8081\"", &["admin_listen", "no token", "[tokens.ops]"]);
    refused("[tokens.ops]\n¶value = \"\"\nallow = [\"admin\"]", &["tokens.ops.value", "is empty"]);
    refused("[tokens.ops]\n¶value = \"env:EMPTY\"\nallow = [\"admin\"]", &["is empty"]);
    refused(
        "[tokens.ops]\n¶value = \"fifteen-letters\"\nallow = [\"admin\"]",
        &["tokens.ops.value", "shorter than 16 characters", "hint: make one with"],
    );
    refused(
        &format!(
            "¶admin_open = true\nadmin_listen = \"0.0.0.0:8081\"\n\
             [tokens.ops]\nvalue = \"{SECRET}\"\nallow = [\"admin\"]"
        ),
        &["admin_open", "admin_listen is 0.0.0.0:8081", "hint: remove admin_open"],
    );
    refused("¶admin_open = \"yes\"", &["admin_open", "true or false"]);
    refused("[tokens.¶ops]\nallow = [\"admin\"]", &["tokens.ops", "has no value"]);
    refused(&format!("[tokens.¶ops]\nvalue = \"{SECRET}\""), &["tokens.ops", "allows nothing"]);
    refused(
        &format!("[tokens.ops]\nvalue = \"{SECRET}\"\nallow = [¶\"root\"]"),
        &["tokens.ops.allow", "\"root\" is not a permission"],
    );
    refused(
        &format!(
            "[tokens.a]\nvalue = \"{SECRET}\"\nallow = [\"read\"]\n\
             [tokens.b]\n¶value = \"env:FULL\"\nallow = [\"admin\"]"
        ),
        &["tokens.b.value", "the same value as tokens.a"],
    );
    let open = format!(
        "admin_listen = \"0.0.0.0:8081\"\n[tokens.ops]\nvalue = \"{SECRET}\"\nallow = [\"admin\"]"
    );
    assert_eq!(check_config(&open).code, 0);
}

#[test]
fn tls_needs_a_certificate_and_its_key() {
    refused("[¶tls]\ncert = \"x.pem\"", &["tls", "has no key"]);
    refused(
        "[tls]\n¶cert = \"/no/such.pem\"\nkey = \"/no/such.key\"",
        &["tls.cert", "reading /no/such.pem", "hint: write a PEM file"],
    );
}

#[test]
fn all_problems_are_reported_at_once_in_the_order_of_the_file() {
    let run = check_config(
        "drain = \"x\"\nlisen = 1\n[sources.b]\nprovider = \"nope\"\n[sources.a]\nsecrets = [\"\"]",
    );
    let lines: Vec<_> = run
        .stderr
        .lines()
        .filter_map(|line| line.split("hapax.toml:").nth(1)?.split(':').next())
        .collect();
    assert_eq!(lines, ["1", "2", "4", "5"], "{}", run.stderr);
}

#[test]
fn errors_in_flags_and_variables_name_them() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(&dir, "hapax.toml", "");
    let run = hapax(&["serve", "--config", &file, "--listen", "nowhere"]).run();
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("--listen: \"nowhere\" is not an address"), "{run:?}");
    let run = hapax(&["serve", "--config", &file]).env("HAPAX_DRAIN", "soon").run();
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("HAPAX_DRAIN: \"soon\" is not a duration"), "{run:?}");
    let run = hapax(&["serve", "--config", &file, "--database-url", "mysql://u:hunter2@h"]).run();
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("--database-url: must begin with postgres://"), "{run:?}");
    assert!(!run.stderr.contains("hunter2"), "{run:?}");
    let run = hapax(&["serve", "--config", &file]).env("HAPAX_REDIS_URL", "redis://h").run();
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("HAPAX_REDIS_URL: needs database_url"), "{run:?}");
    let run = hapax(&["serve", "--config", &file, "--roles", "ingress,wroker"]).run();
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("--roles: \"wroker\" is not a role"), "{run:?}");
    assert!(run.stderr.contains("did you mean \"worker\"?"), "{run:?}");
    let run = hapax(&["serve", "--config", &file]).env("HAPAX_ROLES", "ingress,worker").run();
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("HAPAX_ROLES: lacks sender and admin"), "{run:?}");
}

#[test]
fn the_urls_of_shared_servers_are_checked_and_never_shown() {
    // A password in every place that an error could quote.
    for wrong in ["mysql://u:hunter2@h/db", "host=h password=hunter2", "postgres:u:hunter2@h"] {
        let line = format!("¶database_url = \"{wrong}\"");
        refused(&line, &["database_url", "must begin with postgres:// or postgresql://"]);
    }
    refused("¶database_url = \"postgres://u:hunter2\"", &["a port that is not a number"]);
    refused("¶database_url = \"postgres://u:hunter2 @h\"", &["contains whitespace"]);
    refused("¶database_url = \"postgres://\"", &["names no host"]);
    refused("¶database_url = \"env:NOWHERE\"", &["NOWHERE is not set"]);
    refused("¶database_url = 5432", &["database_url", "wrong type"]);
    let shared = "database_url = \"postgres://u:hunter2@h/db\"\n";
    refused(
        &format!("{shared}¶redis_url = \"http://:hunter2@h\""),
        &["redis_url", "must begin with redis:// or rediss://"],
    );
    refused("¶redis_url = \"redis://:hunter2@h\"", &["redis_url", "needs database_url"]);
    let run = check_config(&format!("{shared}redis_url = \"rediss://:hunter2@h:1/0\""));
    assert_eq!((run.code, run.stderr.contains("hunter2")), (0, false), "{run:?}");
}

#[test]
fn roles_are_checked_and_only_nodes_with_a_shared_database_may_have_some_of_them() {
    // With a single process, the work of a missing role would not be done.
    refused("¶roles = [\"ingres\"]", &["roles", "\"ingres\" is not a role", "\"ingress\"?"]);
    refused("¶roles = [\"cook\"]", &["known: ingress, worker, sender, admin"]);
    refused("¶roles = []", &["is empty", "ingress, worker, sender, admin"]);
    refused("¶roles = \"ingress\"", &["wrong type", "list"]);
    refused(
        "¶roles = [\"ingress\", \"worker\", \"admin\"]",
        &[
            "roles: lacks sender: on the embedded database",
            "set database_url to run roles in separate processes",
        ],
    );
    for taken in [
        "roles = [\"admin\", \"sender\", \"worker\", \"ingress\"]",
        "database_url = \"postgres://h/db\"\nroles = [\"worker\", \"sender\"]",
    ] {
        let run = check_config(taken);
        assert_eq!(run.code, 0, "{taken}: {run:?}");
    }
}

#[test]
fn an_unreachable_shared_database_ends_the_start_without_showing_its_password() {
    // The server must not run on the embedded database instead.
    let dir = tempfile::tempdir().unwrap();
    let file =
        write(&dir, "hapax.toml", "listen = \"127.0.0.1:0\"\nadmin_listen = \"127.0.0.1:0\"");
    let run = hapax(&["serve", "--config", &file])
        .env("HAPAX_DATABASE_URL", "postgres://u:hunter2@127.0.0.1:1/hapax")
        .in_dir(dir.path())
        .run();
    assert_eq!(run.code, 3, "{run:?}");
    assert!(run.stderr.contains("opening postgres://127.0.0.1:1/hapax"), "{run:?}");
    assert!(!run.stderr.contains("hunter2") && !dir.path().join("hapax-data").exists(), "{run:?}");
}

#[test]
fn a_missing_config_file_is_an_error_and_not_dev_mode() {
    for command in ["serve", "check-config"] {
        let run = hapax(&[command, "--config", "/no/such/hapax.toml"]).run();
        assert_eq!(run.code, 2, "{run:?}");
        assert!(run.stderr.contains("/no/such/hapax.toml: cannot read the config file"), "{run:?}");
    }
}

#[test]
fn dev_mode_refuses_to_listen_on_the_network_and_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let run = hapax(&["serve", "--listen", "0.0.0.0:0"]).in_dir(dir.path()).run();
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stderr.contains("dev mode, which listens on loopback only"), "{run:?}");
    assert!(!dir.path().join("hapax-data").exists());
}
