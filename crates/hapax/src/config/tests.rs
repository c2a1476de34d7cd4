//! The configuration as a whole: the default file, precedence, sources, proxies and reloads.

use std::time::Duration;

use hapax_core::Timestamp;
use hapax_core::secret::Secret;

use super::overrides::OVERRIDABLE;
use super::reader::{Environment, ROOT_KEYS, load_in};
use super::shared::Roles;
use super::*;

fn load_text(text: &str, env: &dyn Fn(&str) -> Option<String>, flags: Flags) -> Config {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("hapax.toml");
    std::fs::write(&file, text).unwrap();
    let environment = Environment { env, now: Timestamp::UNIX_EPOCH, read_only: true };
    load_in(&Flags { config: Some(file), ..flags }, &environment).unwrap()
}

#[test]
fn the_file_that_init_writes_spells_out_the_built_in_defaults() {
    let config = load_text(DEFAULT_TOML, &|_| None, Flags::default());
    assert_eq!(config.settings, Settings::default());
    assert!(config.sources.is_empty() && config.tokens.is_empty() && config.tls.is_none());
    assert!(config.proxies.is_empty());
}

#[test]
fn every_key_is_explained_in_the_file_that_init_writes() {
    let is_there = |key: &str| {
        DEFAULT_TOML.lines().any(|line| {
            let line = line.trim_start_matches("# ");
            line.starts_with(&format!("{key} =")) || line.starts_with(&format!("[{key}"))
        })
    };
    let nested =
        ["format", "level", "keys", "events", "deliveries", "cert", "key", "value", "allow"];
    let nested = nested.into_iter().chain(alerts::KEYS).chain(proxies::KEYS);
    let nested = nested.chain(outbound::KEYS).chain(vault::KEYS).chain(portal::KEYS);
    for key in ROOT_KEYS.into_iter().chain(nested).chain(sources::all_keys().copied()) {
        let is_table = ["tenants", "scheme", "handlers", "order", "refetch"].contains(&key);
        assert!(is_there(key) || is_table, "{key}");
    }
    for (_, variable, _) in OVERRIDABLE {
        assert!(DEFAULT_TOML.contains(variable), "{variable}");
    }
}

#[test]
fn every_example_in_the_file_that_init_writes_is_valid_once_uncommented() {
    // The second event_id is the alternative to the first; a table holds one of them.
    let text: String = DEFAULT_TOML
        .lines()
        .filter(|line| !line.contains("hash =") && !line.contains("tenant_from ="))
        // `sql_file` is the alternative to `sql`.
        .filter(|line| !line.contains("sql_file ="))
        // Stripe takes no parameters, and a header that names the caller has nothing to verify.
        .filter(|line| !line.contains("params =") && !line.contains("jwks ="))
        .filter(|line| !line.contains("jwt_key ="))
        .filter(|line| !line.contains("\"/etc/hapax/") && *line != "# [tls]")
        // These settings replace the default.
        .filter(|line| !line.starts_with("allow = []"))
        .map(|line| match line.strip_prefix("# ") {
            Some(code) if is_header(code) || is_assignment(code) => format!("{code}\n"),
            Some(_) | None => format!("{line}\n"),
        })
        .collect();
    let text = text
        .replace("file:/run/secrets/legacy", "env:LEGACY")
        .replace("provider = \"stripe\"", "provider = \"custom\"")
        .replace(
            "[sources.legacy]",
            "[sources.stripe.scheme]\nheader = \"x-signature\"\n[sources.legacy]",
        );
    let known =
        ["STRIPE_SECRET", "ACME_STRIPE_SECRET", "LEGACY", "ID", "HAPAX_OPS_TOKEN", "API_AUTH"];
    let env = |name: &str| match name {
        "HOOK_SECRET" => Some("whsec_c2VjcmV0".to_owned()),
        "HAPAX_VAULT_KEY" => Some(vault_key('A')),
        "HAPAX_VAULT_KEY_OLD" => Some(vault_key('B')),
        name => known.contains(&name).then(|| format!("value of {name}")),
    };
    let config = load_text(&text, &env, Flags::default());
    assert_eq!((config.sources.len(), config.tokens.len()), (3, 1), "{text}");
    assert_eq!(config.proxies.len(), 1, "{text}");
    assert!(matches!(config.vault.key, VaultKeySource::Configured(_)), "{text}");
    assert_eq!(config.vault.old.len(), 1, "{text}");
    let proxy = config.settings.outbound.proxy.as_ref().map(|proxy| proxy.authority());
    assert_eq!(proxy, Some("egress.internal:3128"));
    let handlers: Vec<_> = config.sources.iter().map(|it| it.handlers.len()).collect();
    assert_eq!(handlers, [0, 3, 3], "{text}");
}

/// 32 bytes in base64, made of one letter.
fn vault_key(letter: char) -> String {
    format!("{}=", String::from_iter([letter; 42]) + "A")
}

fn is_header(line: &str) -> bool {
    line.starts_with('[') && line.ends_with(']') && !line.contains(':')
}

fn is_assignment(line: &str) -> bool {
    let key = line.split(" = ").next().unwrap_or_default();
    line.contains(" = ") && key.chars().all(|c| c.is_ascii_lowercase() || c == '_')
}

#[test]
fn flags_beat_the_environment_which_beats_the_file_which_beats_the_defaults() {
    let text = "listen = \"127.0.0.1:1\"\nadmin_listen = \"127.0.0.1:2\"\ndrain = \"3s\"";
    let env = |name: &str| match name {
        "HAPAX_LISTEN" => Some("127.0.0.1:11".to_owned()),
        "HAPAX_ADMIN_LISTEN" => Some("127.0.0.1:12".to_owned()),
        "HAPAX_DRAIN" => Some(String::new()),
        "HAPAX_LOG" => Some("debug".to_owned()),
        _other => None,
    };
    let flags = Flags { listen: Some("127.0.0.1:21".to_owned()), ..Flags::default() };
    let settings = load_text(text, &env, flags).settings;
    assert_eq!(settings.listen.port(), 21);
    assert_eq!(settings.admin_listen.port(), 12);
    assert_eq!(settings.drain, Duration::from_secs(3));
    assert_eq!(settings.log.level, "debug");
    assert_eq!(settings.max_body_bytes, 1 << 20);
}

#[test]
fn each_alert_can_be_set_and_switched_off() {
    let off: String = alerts::KEYS.map(|key| format!("{key} = \"off\"\n")).concat();
    let read = |text: &str| {
        load_text(&format!("[alerts]\n{text}"), &|_| None, Flags::default()).settings.alerts
    };
    let none = Alerts {
        duplicate_spike: None,
        failed_verifications: None,
        conflicts: None,
        handler_gone: false,
        circuits: false,
        vault_key: false,
        oldest_job: None,
        dead_letters: None,
        review: false,
        silence: None,
        secret_expiry: None,
        clock_skew: None,
        log_growth: None,
        statements: false,
        store: false,
    };
    assert_eq!(read(&off), none);
    let set = read("duplicate_spike = \"5\"\nsilence = \"2d\"\nlog_growth = 1000");
    let two_days = Duration::from_secs(2 * 86_400);
    assert_eq!((set.duplicate_spike, set.silence), (Some(5), Some(two_days)));
    assert_eq!((set.log_growth, set.store), (Some(1_000), true));
}

#[test]
fn urls_of_shared_servers_are_read_and_kept_out_of_debug_output() {
    // The password comes from a flag, from a variable and from a variable that the file names.
    let env = |name: &str| match name {
        "HAPAX_REDIS_URL" => Some("redis://:hunter2@cache/0".to_owned()),
        "HAPAX_ROLES" => Some("worker, admin".to_owned()),
        "URL" => Some("postgres://u:hunter2@filed/db".to_owned()),
        _other => None,
    };
    let text = "database_url = \"env:URL\"\nroles = [\"ingress\"]";
    let config = load_text(text, &env, Flags::default());
    let url = config.settings.database_url.as_ref().map(ServiceUrl::expose);
    assert_eq!(url, Some("postgres://u:hunter2@filed/db"));
    assert_eq!(config.settings.roles, Roles::parse(["admin", "worker"]).unwrap());
    assert!(!format!("{config:?}").contains("hunter2"));
    let flag = Secret::new("postgres://u:hunter2@flagged/db");
    let flags = Flags { database_url: Some(flag), ..Flags::default() };
    let flagged = load_text(text, &env, flags);
    let shown = format!("{flagged:?}");
    assert!(shown.contains("flagged/db") && !shown.contains("hunter2"), "{shown}");
    assert_eq!(AppliedAtStart::of(&config).pending(&flagged), ["database_url"]);
}

#[test]
fn only_declared_pairs_answer_and_each_on_its_own_path() {
    let text = r#"
        [sources.a]
        provider = "custom"
        event_id = "/id"
        scheme = { header = "x-signature" }
        [sources.a.tenants.acme]
        secrets = ["one"]
        [sources.a.tenants.zeta]
        secrets = ["two", { value = "three", until = 2026-12-01T00:00:00Z }]
        [sources.b]
        provider = "custom"
        event_id = "/id"
        scheme = { header = "x-signature" }
        secrets = ["four"]
        [sources.b.tenants.acme]
        secrets = ["five"]
        [sources.c]
        provider = "custom"
        event_id = "/id"
        scheme = { header = "x-signature" }
        [sources.c.tenants.default]
        secrets = ["six"]
    "#;
    let config = load_text(text, &|_| None, Flags::default());
    let paths: Vec<_> = config.sources.iter().map(|source| source.path.as_str()).collect();
    let ours = ["/webhooks/acme/a", "/webhooks/zeta/a", "/webhooks/b", "/webhooks/acme/b"];
    assert_eq!(paths, [&ours[..], &["/webhooks/c"]].concat());
}

#[test]
fn a_proxy_has_a_default_for_all_but_where_it_stands() {
    let text = "[proxies.api]\nlisten = \"127.0.0.1:0\"\nupstream = \"http://127.0.0.1:3000\"";
    let config = load_text(text, &|_| None, Flags::default());
    let [api] = &*config.proxies else { panic!("{:?}", config.proxies) };
    let spans = (api.ttl, api.lease, api.wait).into();
    let [ttl, lease, wait]: [Duration; 3] = spans;
    assert_eq!((ttl.as_secs(), lease.as_secs(), wait.as_secs()), (72 * 3_600, 60, 0));
    assert_eq!((&api.scope, api.mismatch_status.as_u16()), (&CallerIdentity::Default, 409));
    // The config is loaded with a warning: a token that changes between two attempts would make
    // them two requests.
    assert!(config.warnings.iter().any(|it| it.contains("proxies.api: no `scope`")));
}

#[test]
fn a_proxy_that_moves_comes_or_goes_waits_for_a_restart_and_new_rules_do_not() {
    let proxy = |name: &str, port: u16, rest: &str| {
        format!(
            "[proxies.{name}]\nlisten = \"127.0.0.1:{port}\"\n\
             upstream = \"http://127.0.0.1:3000\"\nscope = \"none\"\n{rest}\n"
        )
    };
    let load = |text: String| load_text(&text, &|_| None, Flags::default());
    let old = load(proxy("a", 1, "") + &proxy("b", 2, "") + &proxy("c", 3, ""));
    let new = load(proxy("a", 1, "ttl = \"1h\"") + &proxy("b", 9, "") + &proxy("d", 4, ""));
    assert_eq!(
        AppliedAtStart::of(&old).pending(&new),
        ["proxies.b.listen", "proxies.c", "proxies.d"]
    );
}

#[test]
fn a_longer_body_waits_for_a_restart_only_where_sql_handlers_would_notice() {
    // The limit of values on the embedded database is 32 MiB, or twice `max_body` at the start.
    let load = |text: &str| load_text(text, &|_| None, Flags::default());
    let postgres = "database_url = \"postgres://u@db/hapax\"\n";
    let check = |before: &str, old: &str, new: &str, expected: &[&str]| {
        let [old, new] = [old, new].map(|max| load(&format!("{before}max_body = \"{max}\"")));
        assert_eq!(AppliedAtStart::of(&old).pending(&new), expected);
    };
    check("", "1MiB", "16MiB", &[]);
    check("", "1MiB", "17MiB", &["max_body (for SQL handlers)"]);
    check("", "20MiB", "1MiB", &[]);
    check(postgres, "1MiB", "17MiB", &[]);
}

#[test]
fn a_shorter_retention_of_keys_waits_for_a_restart_only_where_redis_would_outlive_it() {
    // Redis is opened with the shortest retention of all sources.
    let load = |redis: &str, sources: &[&str], rest: &str| {
        let sources = sources.iter().enumerate().map(|(n, provider)| {
            format!("[sources.s{n}]\nprovider = \"{provider}\"\nsecrets = [\"secret {n}\"]\n")
        });
        let text = format!("{redis}{}{rest}", sources.collect::<String>());
        load_text(&text, &|_| None, Flags::default())
    };
    let redis = "database_url = \"postgres://u@db/hapax\"\nredis_url = \"redis://cache\"\n";
    let days = |days: u32| format!("[retention]\nkeys = \"{days}d\"\n");
    let check = |redis: &str, old: (&[&str], &str), new: (&[&str], &str), waits: bool| {
        let [old, new] = [old, new].map(|(sources, rest)| load(redis, sources, rest));
        let expected: &[&str] = if waits { &["retention.keys (for Redis)"] } else { &[] };
        assert_eq!(AppliedAtStart::of(&old).pending(&new), expected);
    };
    let (stripe, github): (&[&str], &[&str]) = (&["stripe"], &["github"]);
    check(redis, (stripe, &days(60)), (stripe, &days(59)), true);
    check(redis, (stripe, &days(60)), (stripe, &days(61)), false);
    check("", (stripe, &days(60)), (stripe, &days(59)), false);
    // The keys of a source that signs no time are kept for ever by default.
    check(redis, (github, ""), (github, &days(59)), true);
    check(redis, (github, &days(59)), (github, ""), false);
    check(redis, (github, ""), (&["github", "stripe"], ""), true);
    check(redis, (stripe, ""), (&["stripe", "github"], ""), false);
}

#[test]
fn a_new_outbound_proxy_waits_for_a_restart_where_keys_of_senders_are_fetched() {
    let load = |text: &str| load_text(text, &|_| None, Flags::default());
    let through = |host: &str| load(&format!("[outbound]\nproxy = \"http://{host}:3128\"\n"));
    let waits = ["outbound.proxy (for keys of senders)"];
    assert_eq!(AppliedAtStart::of(&load("")).pending(&through("a")), waits);
    assert_eq!(AppliedAtStart::of(&through("a")).pending(&through("b")), waits);
    assert_eq!(AppliedAtStart::of(&through("a")).pending(&through("a")), [""; 0]);
}

#[test]
fn a_config_file_that_disappears_does_not_turn_a_reload_into_dev_mode() {
    // The directory that `load_text` created is removed by now. The reload must fail and not return the sources of dev
    // mode.
    let config = load_text("", &|_| None, Flags::default());
    let errors = config.reload().unwrap_err().to_string();
    assert!(errors.contains("cannot read the config file"), "{errors}");
}

#[test]
fn nodes_that_share_a_database_start_without_a_vault_key_and_say_so() {
    // A config that was written before the vault existed must not fail. A key in each data directory would differ
    // between nodes.
    let on_postgres = "database_url = \"postgres://h/db\"\n";
    let load = |text: String| load_text(&text, &|_| None, Flags::default());
    let without = load(on_postgres.to_owned());
    assert!(matches!(without.vault.key, VaultKeySource::Missing));
    let warns = |config: &Config| config.warnings.iter().any(|warning| warning == NO_VAULT_KEY);
    assert!(warns(&without), "{:?}", without.warnings);
    // A node without the admin side and the sender stores no secrets.
    let ingress = load(format!("{on_postgres}roles = [\"ingress\", \"worker\"]\n"));
    assert!(!warns(&ingress), "{:?}", ingress.warnings);
    let with = load(format!("{on_postgres}[vault]\nkey = \"{}\"\n", vault_key('A')));
    assert!(!warns(&with), "{:?}", with.warnings);
    let keys = with.vault.open(false).unwrap().map(|vault| vault.key_ids().count());
    assert_eq!(keys, Some(1));
    // On the embedded database the key is in the data directory.
    let embedded = load(format!("[vault]\nold = [\"{}\"]\n", vault_key('B')));
    let VaultKeySource::File(file) = &embedded.vault.key else { panic!("{:?}", embedded.vault) };
    assert_eq!(file.path(), std::path::Path::new("hapax-data/vault.key"));
    assert!(!warns(&embedded), "{:?}", embedded.warnings);
}

#[test]
fn vault_keys_come_from_the_environment_or_a_file_and_stay_out_of_debug_output() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("old.key");
    std::fs::write(&file, format!("{}\n", vault_key('B'))).unwrap();
    let env = |name: &str| (name == "KEY").then(|| vault_key('A'));
    let text = format!("[vault]\nkey = \"env:KEY\"\nold = [\"file:{}\"]\n", file.display());
    let config = load_text(&text, &env, Flags::default());
    let ids: Vec<_> = config.vault.open(false).unwrap().unwrap().key_ids().collect();
    let id = |letter| hapax_core::vault::VaultKey::from_base64(&vault_key(letter)).unwrap().id();
    assert_eq!(ids, [id('A'), id('B')]);
    assert!(config.watched_files().contains(&file));
    let shown = format!("{config:?}");
    assert!(!shown.contains("AAAA") && !shown.contains("BBBB"), "{shown}");
}

#[test]
fn only_dev_mode_allows_endpoints_on_loopback() {
    let outbound = load_text("", &|_| None, Flags::default()).settings.outbound;
    assert_eq!((outbound.allow.len(), &*outbound.ports), (0, &[443, 80][..]));
    // If the default config file does not exist, the server runs in dev mode.
    let dir = tempfile::tempdir().unwrap();
    let data_dir = dir.path().join("data").display().to_string();
    let environment = Environment { env: &|_| None, now: Timestamp::UNIX_EPOCH, read_only: true };
    assert!(!std::path::Path::new(DEFAULT_PATH).exists());
    let dev = load_in(&Flags { data_dir: Some(data_dir), ..Flags::default() }, &environment);
    let nets: Vec<_> =
        dev.unwrap().settings.outbound.allow.iter().map(|it| it.to_string()).collect();
    assert_eq!(nets, ["127.0.0.0/8", "::1/128"]);
}

#[test]
fn an_allow_that_contains_every_address_is_worth_a_warning() {
    for (allow, warns) in [("10.0.0.0/8", false), ("0.0.0.0/0", true), ("::/0", true)] {
        let text = format!("[outbound]\nallow = [\"{allow}\"]\nports = []");
        let config = load_text(&text, &|_| None, Flags::default());
        let found = config.warnings.iter().any(|it| it.contains("every address"));
        assert_eq!(found, warns, "{allow}: {:?}", config.warnings);
    }
}
