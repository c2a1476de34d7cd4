//! Handlers in the config, through the real binary: each error has its line, including the line of
//! SQL inside the file, and no secret is shown.

use crate::common::{Run, hapax, write};

/// A secret that must never be printed.
const SECRET: &str = "s3cr3t-hunter2-never-print-me";

fn check_config(text: &str) -> Run {
    let dir = tempfile::tempdir().unwrap();
    let file = write(&dir, "hapax.toml", text);
    write(&dir, "bad.sql", "SELECT 1;\n\nSELECT :evnt_id;\n");
    write(&dir, "fee.sql", "SELECT :event_id;\n");
    write(&dir, "empty.sql", "-- nothing yet\n");
    hapax(&["check-config", "--config", &file])
        .env("GOOD", "whsec_c2VjcmV0")
        .env("HUNTER", SECRET)
        .in_dir(dir.path())
        .run()
}

fn source(provider: &str, rest: &str) -> String {
    format!("[sources.a]\nprovider = \"{provider}\"\nsecrets = [\"x\"]\n{rest}")
}

fn handler(rest: &str) -> String {
    source("stripe", &format!("[sources.a.handlers.fee]\n{rest}"))
}

fn order(rest: &str) -> String {
    handler(&format!("pull = true\n[sources.a.handlers.fee.order]\n{rest}"))
}

/// `¶` marks the position of the error; the mark itself is removed.
fn refused(marked: &str, parts: &[&str]) {
    let before = marked.split('¶').next().unwrap();
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap().chars().count() + 1;
    let run = check_config(&marked.replace('¶', ""));
    assert_eq!(run.code, 2, "{marked}\n{run:?}");
    let place = format!("hapax.toml:{line}:{column}:");
    let errors = format!("\n{}", run.stderr);
    let about = errors
        .split("\nerror: ")
        .find(|error| error.contains(&place) && parts.iter().all(|part| error.contains(part)));
    assert!(about.is_some(), "wanted {place} with {parts:?}\n{marked}\n{}", run.stderr);
    assert_eq!(errors.matches("\nerror: ").count(), 1, "{marked}\n{}", run.stderr);
    assert!(!run.stderr.contains("hunter2") && !run.stdout.contains("hunter2"), "{run:?}");
}

fn taken(text: &str, warnings: &[&str]) {
    let run = check_config(text);
    assert_eq!(run.code, 0, "{text}\n{run:?}");
    let found: Vec<_> = run.stderr.lines().filter(|line| line.starts_with("warning")).collect();
    assert_eq!(found.len(), warnings.len(), "{text}\n{found:?}");
    for (found, expected) in found.iter().zip(warnings) {
        assert!(found.contains(expected), "{found} / {expected}");
    }
}

#[test]
fn a_handler_runs_exactly_one_thing() {
    taken(&handler("sql = \"SELECT :id\""), &[]);
    taken(&handler("sql_file = \"fee.sql\""), &[]);
    taken(&handler("http = \"https://app.internal/hooks\"\nsecret = \"env:GOOD\""), &[]);
    taken(&handler("pull = true"), &[]);
    taken(&handler("pull = false\nsql = \"SELECT :id\""), &[]);
    refused(
        &source("stripe", "[sources.a.handlers.¶fee]"),
        &["sources.a.handlers.fee", "has nothing to run", "pull = true"],
    );
    refused(&source("stripe", "[sources.a.handlers.¶fee]\npull = false"), &["nothing to run"]);
    refused(
        &handler("sql = \"SELECT 1\"\n¶http = \"http://a/\""),
        &["handlers.fee.http", "cannot be combined with `sql`"],
    );
    refused(&handler("http = \"http://a/\"\n¶pull = true"), &["combined with `http`"]);
    refused(&handler("sql = \"SELECT 1\"\n¶sql_file = \"fee.sql\""), &["combined with `sql`"]);
    refused(&handler("¶pull = 1"), &["wrong type", "true or false"]);
    refused(&handler("¶sql = [\"SELECT 1\"]"), &["wrong type", "text"]);
    refused(&handler("sql = \"SELECT 1\"\n¶secret = \"env:GOOD\""), &["applies to `http` only"]);
    refused(&handler("pull = true\n¶sign_as = \"provider\""), &["applies to `http` only"]);
}

#[test]
fn unknown_keys_and_names_that_cannot_be_used_are_refused() {
    refused(&handler("pull = true\n¶retyr = [\"0s\"]"), &["unknown key", "`retry`"]);
    refused(&handler("pull = true\n¶concurency = 1"), &["unknown key", "`concurrency`"]);
    refused(&order("resource = \"/r\"\nby = \"/b\"\n¶polcy = \"latest\""), &["`policy`"]);
    refused(
        &source("stripe", "[sources.a.handlers.¶\"a b\"]\npull = true"),
        &["is not a valid name", "1 to 64 letters"],
    );
    refused(&source("stripe", "¶handlers = 1"), &["handlers", "wrong type"]);
    refused(&source("stripe", "handlers.¶fee = 1"), &["handlers.fee", "wrong type"]);
}

#[test]
fn an_error_in_the_sql_has_its_own_line_of_the_config() {
    refused(
        &handler("sql = \"SELECT ¶:evnt_id\""),
        &["handlers.fee.sql: unknown parameter :evnt_id", "did you mean :event_id?"],
    );
    refused(&handler("sql = 'SELECT \"é\", ¶:evnt_id'"), &["unknown parameter"]);
    refused(
        &handler("sql = \"\"\"\nINSERT INTO fees\nVALUES (:id,\n  ¶:amount)\n\"\"\""),
        &["unknown parameter :amount", "known: :tenant"],
    );
    refused(&handler("sql = '''SELECT 1;\n¶COMMIT'''"), &["cannot begin with COMMIT", "Hapax"]);
    refused(&handler("sql = '''\n¶CREATE TABLE x (y)'''"), &["CREATE", "migration of your own"]);
    refused(&handler("sql = \"SELECT ¶'abc\""), &["a string is not closed"]);
    refused(&handler("sql = \"¶\""), &["there is no statement"]);
    // With escapes the text differs from the file, so the lines of the text are counted.
    refused(
        &handler("¶sql = \"SELECT \\\"a\\\";\\nSELECT :evnt_id\""),
        &["in the SQL, line 2, column 8: unknown parameter :evnt_id"],
    );
    refused(
        &handler("¶sql = \"\"\"SELECT 1; \\\n   SELECT :evnt_id\"\"\""),
        &["in the SQL, line 1, column 18: unknown parameter :evnt_id"],
    );
}

#[test]
fn statements_are_read_in_the_dialect_of_the_database_that_is_set() {
    // Statements that are valid in one dialect and invalid in the other.
    let on_postgres = |rest: &str| {
        let vault = format!("vault = {{ key = \"{}=\" }}", "A".repeat(43));
        let url = "database_url = \"postgres://u:hunter2@h/db\"";
        format!("{url}\n{vault}\n{}", handler(rest))
    };
    let merge = "sql = \"MERGE INTO a USING b ON a.x = b.x WHEN MATCHED THEN DO NOTHING\"";
    taken(&on_postgres(merge), &[]);
    refused(&handler(&merge.replace("MERGE", "¶MERGE")), &["statement 1 cannot begin with MERGE"]);
    taken(&on_postgres("sql = \"SELECT a[1:n] /* /* */ :nothing */, b ? 'c', :id::uuid\""), &[]);
    refused(&handler("sql = \"SELECT b ¶? 'c'\""), &["? is not a parameter"]);
    refused(&on_postgres("sql = \"¶REPLACE INTO a VALUES (1)\""), &["cannot begin with REPLACE"]);
    refused(&on_postgres("sql = '''SELECT 1;\n¶LOCK a'''"), &["statement 2", "FOR UPDATE"]);
    refused(&on_postgres("¶sql_file = \"bad.sql\""), &["bad.sql:3:8: unknown parameter"]);
    // On PostgreSQL the SQL of a handler does not delay acks, so it may take longer, and there is
    // no warning.
    taken(&on_postgres("sql = \"SELECT 1\"\ntimeout = \"2s\""), &[]);
    refused(&on_postgres("sql = \"SELECT 1\"\n¶lease = \"19s\""), &["twice the timeout of 10s"]);
    // An invalid URL is reported once, and not again for each statement.
    let wrong = on_postgres(merge).replace("postgres:", "mysql:");
    refused(&format!("¶{wrong}"), &["database_url: must begin with postgres://"]);
}

#[test]
fn the_environment_can_choose_the_database_too() {
    // A file that is valid with one database and invalid with the other.
    let dir = tempfile::tempdir().unwrap();
    let file = write(&dir, "hapax.toml", &handler("sql = \"CALL charge(:id)\""));
    let check = || hapax(&["check-config", "--config", &file]);
    assert_eq!(check().run().code, 2);
    let run = check().env("HAPAX_DATABASE_URL", "postgres://h/db").run();
    assert_eq!(run.code, 0, "{run:?}");
}

#[test]
fn an_error_in_a_file_of_sql_names_that_file_and_its_line() {
    refused(&handler("¶sql_file = \"bad.sql\""), &["bad.sql:3:8: unknown parameter :evnt_id"]);
    refused(&handler("¶sql_file = \"empty.sql\""), &["empty.sql:1:1: there is no statement"]);
    refused(&handler("¶sql_file = \"none.sql\""), &["cannot read none.sql", "is started"]);
    refused(&handler("¶sql_file = \".\""), &["cannot read .", "not a regular file"]);
}

#[test]
fn parameters_that_nothing_fills_are_worth_a_warning() {
    taken(&handler("sql = \"SELECT :resource\""), &[":resource is NULL without"]);
    refused(
        &handler("¶sql = \"SELECT :current\""),
        &["fee.sql: :current needs refetch", "[sources.a.handlers.fee.refetch]"],
    );
    taken(&handler("sql = \"SELECT :resource\"\norder = { resource = \"/r\", by = \"/b\" }"), &[]);
}

#[test]
fn a_handler_of_a_sender_that_signs_no_topic_names_its_topics() {
    // A captured request under an invented topic would run a handler of any topic again.
    let of =
        |types: &str| source("shopify", &format!("[sources.a.handlers.fee]\npull = true\n{types}"));
    for open in ["", "types = [\"*\"]", "types = [\"orders/paid\", \"orders/*\"]"] {
        taken(&of(open), &["handlers.fee: Shopify does not sign the topic"]);
    }
    taken(&of("types = [\"orders/paid\", \"orders/create\"]"), &[]);
}

#[test]
fn where_the_app_listens_must_be_a_url() {
    let http = |url: &str| handler(&format!("¶http = \"{url}\"\nsecret = \"env:GOOD\""));
    refused(&http("127.0.0.1:3000/hooks"), &["handlers.fee.http", "http://127.0.0.1:3000/hooks"]);
    refused(&http("localhost"), &["must begin with http:// or https://"]);
    refused(&http("ftp://a/"), &["must begin with http:// or https://"]);
    refused(&http("http://"), &["handlers.fee.http"]);
    refused(&http("http://u:hunter2@a/"), &["must not contain a user name"]);
    refused(&http("http://a/#b"), &["fragment"]);
    refused(&http("http://a/ b"), &["is not a URL"]);
}

#[test]
fn requests_to_the_app_are_signed_or_said_not_to_be() {
    let http = |rest: &str| handler(&format!("http = \"http://a/\"\n{rest}"));
    taken(&http(""), &["no `secret`, so requests to your app are not signed"]);
    taken(&http("sign_as = \"provider\""), &[]);
    taken(&http("sign_as = \"provider\"\nsecret = \"env:HUNTER\""), &[]);
    refused(&http("¶secret = \"env:HUNTER\""), &["Standard Webhooks", "begin with whsec_"]);
    refused(&http("¶secret = \"whsec_hunter2!\""), &["is not base64", "openssl rand"]);
    refused(&http("¶secret = \"whsec_\""), &["Standard Webhooks"]);
    refused(&http("¶secret = \"\""), &["is empty"]);
    refused(&http("¶secret = \"env:NOT_SET_ANYWHERE\""), &["is not set"]);
    refused(&http("¶sign_as = \"hmac\""), &["not a way to sign", "\"provider\""]);
    let discord = "[sources.a]\nprovider = \"discord\"\nsecrets = [\"d75a980182b10ab7d54bfed3c96407\
                   3a0ee172f3daa62325af021a68f707511a\"]\n[sources.a.handlers.h]\nhttp = \"http://a/\"\n";
    refused(
        &format!("{discord}¶sign_as = \"provider\""),
        &["only Discord can sign", "write \"standard\""],
    );
    let custom = "[sources.a]\nprovider = \"custom\"\nevent_id = \"/id\"\nsecrets = [\"x\"]\n\
                  scheme = { header = \"x-signature\" }\n[sources.a.handlers.h]\n\
                  http = \"http://a/\"\nsign_as = \"provider\"";
    taken(custom, &[]);
}

#[test]
fn times_and_counts_stay_within_their_bounds() {
    let pull = |rest: &str| handler(&format!("pull = true\n{rest}"));
    refused(&pull("¶retry = []"), &["is empty", "[\"0s\"] is a single attempt"]);
    refused(&pull("retry = [\"0s\", ¶\"soon\"]"), &["\"soon\" is not a duration"]);
    refused(&pull("¶retry = \"1m\""), &["wrong type", "list"]);
    let many = |count: usize| format!("[{}]", vec!["\"1m\""; count].join(","));
    refused(&pull(&format!("¶retry = {}", many(51))), &["51 attempts are more than 50"]);
    taken(&pull(&format!("retry = {}", many(50))), &[]);
    refused(&pull("¶timeout = \"0s\""), &["longer than zero"]);
    refused(&pull("¶lease = \"0s\""), &["longer than zero"]);
    refused(&pull("timeout = \"1s\"\n¶lease = \"1999ms\""), &["twice the timeout of 1s"]);
    taken(&pull("timeout = \"1s\"\nlease = \"2s\""), &[]);
    taken(&pull("lease = \"1s\""), &[]);
    refused(&handler("sql = \"SELECT 1\"\n¶lease = \"199ms\""), &["twice the timeout of 100ms"]);
    refused(
        &handler("http = \"http://a/\"\nsecret = \"env:GOOD\"\n¶lease = \"19s\""),
        &["twice the timeout of 10s"],
    );
    taken(&handler("sql = \"SELECT 1\"\ntimeout = \"2s\""), &["senders get no answer meanwhile"]);
    for bad in ["0", "1025", "-1", "\"many\""] {
        refused(&pull(&format!("¶concurrency = {bad}")), &["not a number from 1 to 1024"]);
    }
    refused(&pull("¶concurrency = 1.5"), &["wrong type"]);
    taken(&pull("concurrency = 1024"), &[]);
    refused(&pull("types = [¶5]"), &["types", "wrong type"]);
    refused(&pull("¶types = [\"\"]"), &["types", "matches nothing"]);
    refused(&pull("¶types = \"payout.*\""), &["wrong type", "list"]);
}

#[test]
fn order_needs_its_two_pointers_and_knows_its_words() {
    let pair = "resource = \"/r\"\nby = \"/b\"\n";
    taken(&order(pair), &[]);
    refused(
        &handler("pull = true\n[sources.a.handlers.fee.¶order]\nby = \"/b\""),
        &["fee.order: has no resource"],
    );
    refused(
        &handler("pull = true\n[sources.a.handlers.fee.¶order]\nresource = \"/r\""),
        &["fee.order: has no by"],
    );
    refused(&order("¶resource = \"r\"\nby = \"/b\""), &["order.resource", "starts with \"/\""]);
    refused(&order("resource = \"/r\"\n¶by = \"header:x\""), &["order.by", "event's own JSON"]);
    refused(&order(&format!("{pair}¶policy = \"newest\"")), &["not an order policy", "machine"]);
    let sequence = |rest: &str| order(&format!("{pair}policy = \"sequence\"\n{rest}"));
    refused(&sequence("¶hold = \"0s\""), &["longer than zero"]);
    refused(&sequence("¶hold_max = 0"), &["not a number from 1 to 1000000"]);
    refused(&sequence("¶on_gap = \"stop\""), &["\"review\" or \"go\""]);
    refused(&sequence("¶start = \"last\""), &["neither a number nor \"first\""]);
    taken(&sequence("start = \"first\""), &[]);
    taken(&sequence("hold = \"1m\"\nhold_max = 5\non_gap = \"go\""), &[]);
    // A key of another policy has no effect, and a warning says so.
    let latest = |rest: &str| order(&format!("{pair}{rest}"));
    taken(&latest("hold = \"1m\""), &["order: `hold` has no effect, since \"latest\" has"]);
    taken(
        &latest("start = \"new\"\nstate = \"/s\"\nallow = [\"a -> b\"]"),
        &["`start` has", "`state` has", "`allow` has"],
    );
    taken(&sequence("state = \"/s\""), &["`state` has no effect, since \"sequence\""]);
}

#[test]
fn a_machine_needs_its_states_and_the_ways_between_them() {
    // Each mistake is on its own line: a mistyped state in `start`, a wrong arrow, a missing
    // pointer.
    let machine = |rest: &str| order(&format!("policy = \"machine\"\nresource = \"/r\"\n{rest}"));
    let (state, allow) = ("state = \"/s\"\n", "allow = [\"new -> paid\", \"paid->sent\"]\n");
    taken(&machine(&format!("{state}{allow}")), &[]);
    taken(&machine(&format!("{state}{allow}start = \"paid\"\nhold = \"1m\"")), &[]);
    taken(&machine(&format!("{state}{allow}by = \"/b\"")), &["`by` has no effect, since"]);
    refused(
        &machine(&format!("¶{state}{allow}").replace("\"/s", "\"s")),
        &["order.state", "\"/\""],
    );
    refused(
        &machine(&format!("{state}{allow}¶start = \"payed\"")),
        &["\"payed\" appears in no transition"],
    );
    refused(
        &machine(&format!("{state}{allow}¶start = 1")),
        &["order.start", "\"1\" appears in no"],
    );
    refused(
        &machine(&format!("{state}allow = [\"a -> b\", ¶\"b > c\"]")),
        &["order.allow", "\"b > c\" is not a transition", "\"pending -> paid\""],
    );
    refused(&machine(&format!("{state}allow = [¶\"a -> b -> c\"]")), &["is not a transition"]);
    refused(&machine(&format!("{state}¶allow = []")), &["allows no transition"]);
    refused(&machine(&format!("{state}¶allow = \"a -> b\"")), &["wrong type", "list"]);
    let missing = |rest: &str| {
        handler(&format!(
            "pull = true\n[sources.a.handlers.fee.¶order]\npolicy = \"machine\"\n\
             resource = \"/r\"\n{rest}"
        ))
    };
    refused(&missing(allow), &["order: has no state", "/data/object/status"]);
    refused(&missing(state), &["order: has no allow", "pending -> paid"]);
}

#[test]
fn refetch_says_where_the_object_is() {
    let refetch = |rest: &str| {
        handler(&format!("sql = \"SELECT :current\"\n[sources.a.handlers.fee.refetch]\n{rest}"))
    };
    let url = "url = \"https://api.example.com/{event_id}\"\n";
    let all = "url = \"https://api.example.com/v1/{tenant}/{event_type}?id={event_id}\"\n\
               headers = { authorization = \"env:HUNTER\", X-Version = \"2\" }\n\
               timeout = \"2s\"\nmax_body = \"64KiB\"\n";
    taken(&refetch(all), &[]);
    taken(&refetch("url = \"http://127.0.0.1:3000\""), &[]);
    let ordered = "[sources.a.handlers.fee.order]\nresource = \"/r\"\nby = \"/b\"\n";
    taken(&format!("{}{ordered}", refetch("url = \"http://a/{resource}\"\n")), &[]);
    refused(
        &refetch("¶url = \"http://a/{resource}\""),
        &["refetch.url: {resource} needs a handler with an order", "add `order`"],
    );
    refused(
        &refetch("url = \"http://a/x/¶{resuorce}\""),
        &["unknown placeholder {resuorce}", "did you mean {resource}?"],
    );
    refused(&refetch("url = \"http://a/¶{id}\""), &["unknown placeholder {id}", "{event_id}"]);
    refused(&refetch("url = \"http://a/¶{event_id\""), &["a { without its }"]);
    refused(&refetch("url = \"http://a/x¶}\""), &["a } without its {"]);
    refused(&refetch("url = \"https://¶{tenant}.example.com/\""), &["part of the host"]);
    refused(&refetch("¶url = \"api.example.com/x\""), &["refetch.url"]);
    refused(&refetch("¶url = \"ftp://a/\""), &["must begin with http:// or https://"]);
    refused(&refetch("¶url = \"http://u:hunter2@a/\""), &["must not contain a user name"]);
    refused(&refetch("¶url = \"http://a/#x\""), &["fragment"]);
    refused(&refetch("¶url = \"http://a/../x\""), &["only of dots"]);
    refused(
        &handler("pull = true\n[sources.a.handlers.fee.¶refetch]\ntimeout = \"1s\""),
        &["fee.refetch: has no url"],
    );
    refused(&refetch(&format!("{url}¶tiemout = \"1s\"")), &["unknown key", "`timeout`"]);
    refused(&refetch(&format!("{url}¶timeout = \"0s\"")), &["longer than zero"]);
    refused(&refetch(&format!("{url}¶max_body = \"17MiB\"")), &["1 to 16MiB"]);
    let header = |header: &str| refetch(&format!("{url}headers = {{ {header} }}"));
    refused(&header("¶authorization = \"env:NOT_SET_ANYWHERE\""), &["is not set"]);
    refused(&header("¶authorization = \"hunter2\\n\""), &["is not a valid header value"]);
    refused(&header("¶\"a b\" = \"x\""), &["is not the name of a header"]);
    refused(&header("¶Host = \"x\""), &["set by the HTTP client"]);
    let lease = |way: &str, rest: &str| {
        handler(&format!("{way}\n{rest}\nrefetch = {{ url = \"http://a/\" }}"))
    };
    refused(&lease("pull = true", "¶lease = \"9s\""), &["twice the timeout of refetch, 5s"]);
    taken(&lease("pull = true", "lease = \"10s\""), &[]);
    refused(
        &lease("http = \"http://a/\"\nsecret = \"env:GOOD\"", "¶lease = \"29s\""),
        &["twice the timeouts of 10s and, for refetch, 5s"],
    );
}

#[test]
fn a_sender_that_waits_has_exactly_one_handler_to_wait_for() {
    let sync = |handlers: &str| source("stripe", &format!("¶mode = \"sync\"\n{handlers}"));
    let one = "[sources.a.handlers.h]\nsql = \"SELECT 1\"\n";
    let other = "[sources.a.handlers.i]\nsql = \"SELECT 1\"\n";
    taken(&sync(one).replace('¶', ""), &[]);
    refused(&sync(""), &["mode", "exactly one handler, and this source has 0"]);
    refused(&sync(&format!("{one}{other}")), &["exactly one handler, and this source has 2"]);
    refused(&sync("[sources.a.handlers.h]\npull = true"), &["cannot wait for", "pull = true"]);
    refused(&source("stripe", "¶sync_timeout = \"0s\""), &["longer than zero"]);
    taken(&source("stripe", "mode = \"async\"\nsync_timeout = \"8s\""), &[]);
}

#[test]
fn check_config_lists_the_handlers() {
    let dir = tempfile::tempdir().unwrap();
    let text = source(
        "stripe",
        "mode = \"sync\"\n[sources.a.handlers.fee]\nsql = \"SELECT 1\"\n\
         [sources.b]\nprovider = \"github\"\nsecrets = [\"y\"]",
    );
    let file = write(&dir, "hapax.toml", &text);
    let run = hapax(&["check-config", "--json", "--config", &file]).run();
    let json: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(json["sources"][0]["handlers"], serde_json::json!(["fee"]), "{run:?}");
    assert_eq!(json["sources"][0]["mode"], "sync");
    assert_eq!(json["sources"][1]["handlers"], serde_json::json!([]));
    assert_eq!(json["sources"][1]["mode"], "async");
}

#[test]
fn statements_that_the_database_cannot_run_are_named_before_the_first_event() {
    // Without this check, a missing table is noticed only when an event fails because of it.
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("hapax-data");
    let sql = |sql: &str| handler(&format!("sql = \"\"\"{sql}\"\"\""));
    let check = |text: &str, status: i32, part: &str| {
        let file = write(&dir, "hapax.toml", text);
        for command in ["check-config", "doctor"] {
            let run = hapax(&[command, "--config", &file]).in_dir(dir.path()).run();
            let said = format!("{}{}", run.stdout, run.stderr);
            assert_eq!(run.code, status, "{command}: {said}");
            assert!(said.contains(part), "{command}: {said}");
        }
    };
    // Without a database, only SQL that no database could run is refused.
    check(&sql("INSERT INTO fees VALUES (:event_id)"), 0, "");
    check(&sql("SELECT 1;\nSELECT FROM WHERE"), 1, "statement 2 (line 2");
    std::fs::create_dir_all(&data).unwrap();
    let database = rusqlite::Connection::open(data.join("hapax.db")).unwrap();
    database.execute_batch("CREATE TABLE other (n)").unwrap();
    check(&sql("INSERT INTO fees VALUES (:event_id)"), 1, "no such table: fees");
    check(&sql("INSERT INTO other VALUES (:event_id, 1)"), 1, "1 columns");
    // The tables of Hapax are created at the first start.
    check(&sql("INSERT INTO hapax_publish (type, data) VALUES ('x', '{}')"), 0, "");
    database.execute_batch("CREATE TABLE fees (id)").unwrap();
    check(&sql("INSERT INTO fees VALUES (:event_id)"), 0, "");
}
