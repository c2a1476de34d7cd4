//! The commands around a server: init, check-config, completions, man, and bad usage.

use crate::common::{hapax, write};

#[test]
fn init_writes_a_config_that_check_config_accepts_and_never_overwrites_it() {
    let dir = tempfile::tempdir().unwrap();
    let first = hapax(&["init"]).in_dir(dir.path()).run();
    assert_eq!((first.code, first.stdout.as_str()), (0, ""), "{first:?}");
    let checked = hapax(&["check-config"]).in_dir(dir.path()).run();
    assert_eq!(checked.code, 0, "{checked:?}");

    let path = dir.path().join("hapax.toml");
    std::fs::write(&path, "drain = \"7s\"\n").unwrap();
    let second = hapax(&["init"]).in_dir(dir.path()).run();
    assert_eq!(second.code, 1, "{second:?}");
    assert!(second.stderr.contains("hapax.toml exists already"), "{second:?}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "drain = \"7s\"\n");
}

#[test]
fn init_into_a_missing_directory_exits_with_3() {
    let run = hapax(&["init", "--config", "/no/such/dir/hapax.toml"]).run();
    assert_eq!(run.code, 3, "{run:?}");
}

#[test]
fn check_config_lists_every_source_with_its_path() {
    let dir = tempfile::tempdir().unwrap();
    let config = "[sources.legacy]\nprovider = \"custom\"\nevent_id = \"/id\"\n\
                  scheme = { header = \"x-signature\" }\nsecrets = [\"one\"]\n\
                  [sources.legacy.tenants.acme]\nsecrets = [\"two\"]\n";
    let file = write(&dir, "hapax.toml", config);
    let run = hapax(&["check-config", "--config", &file]).run();
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(run.stdout, "/webhooks/legacy  custom\n/webhooks/acme/legacy  custom\n");

    let run = hapax(&["check-config", "--json"]).env("HAPAX_CONFIG", &file).run();
    let json: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(json["ok"], true);
    assert_eq!(json["sources"][1]["tenant"], "acme");
    assert_eq!(json["sources"][1]["path"], "/webhooks/acme/legacy");
    assert!(!run.stdout.contains("two"));
}

#[test]
fn check_config_without_a_file_says_so_and_makes_no_dev_secret() {
    let dir = tempfile::tempdir().unwrap();
    let run = hapax(&["check-config"]).in_dir(dir.path()).run();
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stderr.contains("hapax init"), "{run:?}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

// A command that only reads a database must not leave files in the current directory.
#[test]
fn a_command_that_only_reads_creates_no_dev_secret() {
    let dir = tempfile::tempdir().unwrap();
    for command in ["migrate", "doctor"] {
        let run = hapax(&[command, "--database-url", "postgres://127.0.0.1:9/nowhere"])
            .in_dir(dir.path())
            .run();
        assert!([1, 3].contains(&run.code), "{run:?}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{command}");
    }
}

#[test]
fn a_token_for_a_handler_that_cannot_be_claimed_is_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let config = |allow: &str| {
        format!(
            "[tokens.worker]\nvalue = \"token-of-the-worker\"\nallow = [\"claim:{allow}\"]\n\
             [sources.stripe]\nprovider = \"stripe\"\nsecrets = [\"whsec_one\"]\n\
             [sources.stripe.handlers.fee]\npull = true\n\
             [sources.stripe.handlers.log]\nsql = \"SELECT 1\"\n"
        )
    };
    for (allow, is_odd) in
        [("stripe/fee", false), ("stripe/feee", true), ("strype/fee", true), ("stripe/log", true)]
    {
        let file = write(&dir, "hapax.toml", &config(allow));
        let run = hapax(&["check-config", "--config", &file]).run();
        assert_eq!(run.code, 0, "{run:?}");
        let said = run.stderr.contains(&format!("claim:{allow} matches no handler"));
        assert_eq!(said, is_odd, "{allow}: {run:?}");
    }
}

#[test]
fn an_expired_secret_is_a_warning_and_no_error() {
    let dir = tempfile::tempdir().unwrap();
    let config = "[sources.legacy]\nprovider = \"custom\"\nevent_id = \"/id\"\n\
                  scheme = { header = \"x-signature\" }\n\
                  secrets = [\"new\", { value = \"old\", until = \"2020-01-01T00:00:00Z\" }]\n";
    let file = write(&dir, "hapax.toml", config);
    let run = hapax(&["check-config", "--config", &file]).run();
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stderr.contains("the `until` of a secret has passed"), "{run:?}");
}

#[test]
fn a_certificate_with_its_key_is_accepted_and_a_file_without_one_is_not() {
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data");
    let (cert, key) = (format!("{data}/tls-for-tests.pem"), format!("{data}/tls-for-tests.key"));
    let dir = tempfile::tempdir().unwrap();
    let neither = write(&dir, "neither.pem", "nothing in here\n");
    let check = |cert: &str, key: &str| {
        let text = format!("[tls]\ncert = \"{cert}\"\nkey = \"{key}\"\n");
        let file = write(&dir, "hapax.toml", &text);
        hapax(&["check-config", "--config", &file]).run()
    };
    let run = check(&cert, &key);
    assert_eq!(run.code, 0, "{run:?}");
    let run = check(&cert, &neither);
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stderr.contains("hapax.toml:3:1: tls.key: reading "), "{run:?}");
    let run = check(&neither, &key);
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stderr.contains("hapax.toml:2:1: tls.cert: reading "), "{run:?}");
}

#[test]
fn sql_once_prints_a_migration_that_needs_no_other_table_of_hapax() {
    // A user of `hapax.once` alone has no other table of Hapax, so a reference to one would fail.
    let run = hapax(&["sql", "once"]).run();
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stdout.contains("CREATE OR REPLACE FUNCTION hapax.once("), "{run:?}");
    let ours = run.stdout.matches("hapax.").count();
    let own = run.stdout.matches("hapax.once").count();
    assert_eq!(ours, own, "{run:?}");
}

#[test]
fn completions_and_the_manual_page_name_every_command() {
    for args in [&["completions", "bash"][..], &["completions", "zsh"], &["man"]] {
        let run = hapax(args).run();
        assert_eq!(run.code, 0, "{args:?}");
        for command in ["serve", "init", "providers", "verify", "sign", "send"] {
            assert!(run.stdout.contains(command), "{args:?} lacks {command}");
        }
    }
}

#[test]
fn bad_usage_exits_with_two_and_says_nothing_on_stdout() {
    for args in [
        &[][..],
        &["no-such-command"],
        &["serve", "--no-such-flag"],
        &["verify"],
        &["verify", "--provider", "stripe"],
        &["verify", "--batch", "x", "--provider", "stripe"],
        &["verify", "--batch", "x", "--tolerance", "soon"],
        &["sign", "--provider", "stripe"],
        &["send", "stripe"],
        &["send", "no-such-provider", "--to", "http://127.0.0.1:1/"],
        &["send", "stripe", "--to", "http://127.0.0.1:1/", "--count", "0"],
        &["completions", "no-such-shell"],
        &["providers", "no-such-provider"],
    ] {
        let run = hapax(args).run();
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{args:?} {run:?}");
        assert!(!run.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn nothing_is_coloured_in_a_pipe() {
    let run = hapax(&["providers", "no-such-provider"]).run();
    assert!(run.stderr.starts_with("error: unknown provider"), "{run:?}");
    assert!(!run.stderr.contains('\u{1b}'), "{run:?}");
}

#[test]
fn every_provider_shows_a_block_that_check_config_takes() {
    let dir = tempfile::tempdir().unwrap();
    let listed = hapax(&["providers", "--json"]).run();
    assert_eq!(listed.code, 0, "{listed:?}");
    let providers: Vec<serde_json::Value> =
        listed.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(providers.len() >= 50, "{} providers", providers.len());
    for provider in providers {
        let name = provider["name"].as_str().unwrap();
        for fact in ["scheme", "signed", "event_id", "retries"] {
            assert_ne!(provider[fact].as_str(), Some(""), "{name} lacks {fact}");
        }
        let block = provider["config"].as_str().unwrap();
        // The file may have no other problems than unset or missing values.
        let file =
            write(&dir, "hapax.toml", &format!("public_url = \"https://a.example\"\n{block}"));
        let run = hapax(&["check-config", "--config", &file]).in_dir(dir.path()).run();
        for error in run.stderr.lines().filter(|line| line.starts_with("error:")) {
            assert!(
                error.contains("is not set") || error.contains("cannot read"),
                "{name}: {error}\n{block}"
            );
        }
    }
}

#[test]
fn man_prints_every_page_that_it_names() {
    let run = hapax(&["man"]).run();
    assert_eq!(run.code, 0, "{run:?}");
    let text = run.stdout.replace("\\-", "-");
    let titles: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix(".TH "))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(titles.contains(&"hapax") && titles.contains(&"hapax-events-list"), "{titles:?}");
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || "-()".contains(c)));
    let named: Vec<&str> = words
        .filter(|word| word.starts_with("hapax-"))
        .filter_map(|word| word.strip_suffix("(1)"))
        .collect();
    assert!(named.len() > 20, "{named:?}");
    for page in named {
        assert!(titles.contains(&page), "{page} is named and not printed");
    }
}

#[test]
fn migrate_wants_no_secret_but_the_database() {
    let dir = tempfile::tempdir().unwrap();
    let config = "database_url = \"env:NOT_SET\"\n[sources.a]\nprovider = \"stripe\"\n\
                  secrets = [\"env:NOT_SET_EITHER\"]\n";
    let file = write(&dir, "hapax.toml", config);
    let url = "postgres://u:hunter2@127.0.0.1:1/hapax";
    let run = hapax(&["migrate", "up", "--config", &file, "--database-url", url]).run();
    // The command went on to the database, which is not reachable.
    assert_eq!(run.code, 3, "{run:?}");
    assert!(run.stderr.contains("127.0.0.1:1/hapax") && !run.stderr.contains("NOT_SET"), "{run:?}");
    let run = hapax(&["migrate", "--config", &file]).run();
    assert_eq!(run.code, 2, "{run:?}");
    assert!(run.stderr.contains("NOT_SET is not set") && !run.stderr.contains("EITHER"), "{run:?}");
}

#[test]
fn a_data_directory_that_cannot_be_made_fails_the_doctor_and_ends_a_start_alike() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir, "file", "not a directory");
    let data_dir = dir.path().join("file").join("data").display().to_string();
    let run = hapax(&["doctor", "--data-dir", &data_dir]).run();
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stdout.contains("fail  data dir"), "{run:?}");
    let config =
        write(&dir, "hapax.toml", "listen = \"127.0.0.1:0\"\nadmin_listen = \"127.0.0.1:0\"");
    // The exit code is the same in dev mode and with a config: the config is right, the directory
    // is not.
    let args =
        ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--data-dir", &data_dir];
    for start in [&["serve"][..], &["serve", "--config", &config]] {
        let run = hapax(start).args(&args).run();
        assert_eq!(run.code, 3, "{start:?} {run:?}");
        assert!(run.stderr.contains(&data_dir), "{run:?}");
    }
}
