//! `[sources.NAME.handlers.H]`: the handlers of a source, and `mode`, which decides whether the sender
//! waits for them. SQL is parsed here, so that an unknown parameter is a config error with its line.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hapax::limits::{
    CONCURRENCY_DEFAULT, LEASE_DEFAULT, RETRY_DEFAULT, SQLITE_TIMEOUT_DEFAULT, TIMEOUT_DEFAULT,
};
use hapax_core::Source;
use hapax_core::handler::{
    Dialect, Handler, HandlerKind, HttpTarget, Order, Refetch, SignAs, SqlError, SqlParameter,
    SqlProgram, TypeFilter,
};
use hapax_core::job::{HandlerName, Policy};
use hapax_core::presets;
use hapax_core::secret::{ActiveSecret, Secret};
use hapax_core::source::SourceSpec;
use hapax_engine::AnswerMode;
use http::Uri;

use super::document::{Entry, Section};
use super::problem::{InvalidSetting, SettingOrigin};
use super::reader::ConfigReader;
use super::units;

const KEYS: [&str; 13] = [
    "types",
    "sql",
    "sql_file",
    "http",
    "sign_as",
    "secret",
    "pull",
    "retry",
    "timeout",
    "lease",
    "concurrency",
    "order",
    "refetch",
];

/// Every key of a handler, for the test of the default config.
#[cfg(test)]
pub(super) fn all_keys() -> impl Iterator<Item = &'static &'static str> {
    KEYS.iter().chain(&super::order::KEYS).chain(&super::refetch::KEYS)
}

/// The most attempts; after that an operator should decide.
const RETRY_MAX: usize = 50;
/// Above this, a timeout delays answers to senders noticeably.
const SQLITE_TIMEOUT_NOTABLE: Duration = Duration::from_secs(1);
/// Each attempt uses a connection or a thread of the user's app.
const CONCURRENCY_MAX: usize = 1_024;
/// Less than the ten seconds that most senders wait.
const SYNC_TIMEOUT_DEFAULT: Duration = Duration::from_secs(8);
/// The largest SQL file; a larger one is probably not SQL.
const SQL_FILE_BYTES_MAX: u64 = 1 << 20;

impl ConfigReader<'_> {
    /// Reads the handlers of a source. `spec` is the spec of the source, with its parameters.
    pub(super) fn handlers(
        &mut self,
        section: &Section<'_>,
        spec: &SourceSpec,
    ) -> Vec<Arc<Handler>> {
        let Some(handlers) =
            section.get("handlers").and_then(|entry| entry.section(&mut self.problems))
        else {
            return Vec::new();
        };
        let read = |entry: Entry<'_>| {
            if let Err(InvalidSetting { problem, .. }) = units::name(entry.name()) {
                let hint = "use 1 to 64 letters, digits, \"_\", \".\" or \"-\"";
                entry.report(InvalidSetting::new(problem, hint), &mut self.problems);
                return None;
            }
            let handler = entry.section(&mut self.problems)?;
            self.handler(entry.name(), &handler, spec).map(Arc::new)
        };
        handlers.entries().filter_map(read).collect()
    }

    /// Reads `mode` and `sync_timeout`.
    pub(super) fn mode(&mut self, section: &Section<'_>, handlers: &[Arc<Handler>]) -> AnswerMode {
        let timeout = section.get("sync_timeout");
        let timeout = timeout.and_then(|entry| entry.parse(units::span, &mut self.problems));
        let Some(entry) = section.get("mode") else { return AnswerMode::Async };
        match entry.parse(is_sync, &mut self.problems) {
            Some(true) => {}
            Some(false) | None => return AnswerMode::Async,
        }
        // Handlers are counted in the file, so that a handler with an error is not reported as
        // missing as well.
        let declared = section.get("handlers").and_then(|handlers| handlers.as_section());
        let declared = declared.map_or(0, |handlers| handlers.entries().count());
        if declared != 1 {
            let invalid = InvalidSetting::new(
                format!("\"sync\" needs exactly one handler, and this source has {declared}"),
                "the sender gets the answer of that handler; use mode = \"async\" for several handlers",
            );
            entry.report(invalid, &mut self.problems);
        }
        if handlers.iter().any(|handler| matches!(handler.kind, HandlerKind::Pull)) {
            let invalid = InvalidSetting::new(
                "\"sync\" cannot wait for a handler with pull = true",
                "a worker may claim the job at any time: use sql or http, or mode = \"async\"",
            );
            entry.report(invalid, &mut self.problems);
        }
        AnswerMode::Sync { timeout: timeout.unwrap_or(SYNC_TIMEOUT_DEFAULT) }
    }

    fn handler(&mut self, name: &str, section: &Section<'_>, spec: &SourceSpec) -> Option<Handler> {
        section.expect(&KEYS, &mut self.problems);
        let label = format!("sources.{}.handlers.{name}", spec.name);
        let kind = self.kind(section, spec, &label);
        let types = self.types(section);
        let retry = self.retry(section);
        let concurrency = self.parsed_number(section, "concurrency", |text| {
            count(text, CONCURRENCY_MAX, CONCURRENCY_DEFAULT)
        });
        let order = self.order(section, &label);
        let refetch = self.refetch(section);
        let (timeout, lease) =
            self.timeout_and_lease(section, kind.as_ref(), refetch.as_ref(), &label);
        let kind = kind?;
        if let HandlerKind::Sql(program) = &kind {
            self.check_parameters_filled(section, program, order.as_ref(), &label);
        }
        Some(Handler {
            name: HandlerName::new(name),
            kind,
            types: types?,
            policy: Policy { retry: retry?, lease },
            timeout,
            concurrency: concurrency.unwrap_or(CONCURRENCY_DEFAULT),
            order,
            refetch,
        })
    }

    /// Reads exactly one of `sql`, `sql_file`, `http` and `pull`.
    fn kind(
        &mut self,
        section: &Section<'_>,
        spec: &SourceSpec,
        label: &str,
    ) -> Option<HandlerKind> {
        let pull = match section.get("pull") {
            Some(entry) => entry.flag(&mut self.problems)?.then_some(entry),
            None => None,
        };
        let ways = [section.get("sql"), section.get("sql_file"), section.get("http"), pull];
        let mut ways = ways.into_iter().flatten();
        let Some(way) = ways.next() else {
            let invalid = InvalidSetting::new(
                "has nothing to run",
                "add one of sql = \"INSERT …\", sql_file = \"fee.sql\", \
                 http = \"http://127.0.0.1:3000/hooks\" or pull = true",
            );
            section.report(invalid, &mut self.problems);
            return None;
        };
        if let Some(second) = ways.next() {
            let invalid = InvalidSetting::new(
                format!("cannot be combined with `{}`", way.name()),
                "remove one, or add a second handler for it",
            );
            second.report(invalid, &mut self.problems);
            return None;
        }
        if way.name() != "http" {
            for key in ["sign_as", "secret"] {
                if let Some(entry) = section.get(key) {
                    let invalid = InvalidSetting::new("applies to `http` only", "remove it");
                    entry.report(invalid, &mut self.problems);
                }
            }
        }
        match way.name() {
            "sql" => self.sql(&way).map(|program| HandlerKind::Sql(Arc::new(program))),
            "sql_file" => self.sql_file(&way).map(|program| HandlerKind::Sql(Arc::new(program))),
            "http" => self.http(&way, section, spec, label).map(HandlerKind::Http),
            _pull => Some(HandlerKind::Pull),
        }
    }

    fn sql(&mut self, entry: &Entry<'_>) -> Option<SqlProgram> {
        let text = entry.text(&mut self.problems)?;
        let error = match SqlProgram::parse(text, self.dialect) {
            Ok(program) => return Some(program),
            Err(error) => error,
        };
        let at = byte_of(text, &error).and_then(|byte| entry.byte_in_file(self.text, byte));
        match at {
            // The position in the file replaces the position in the text.
            Some(at) => {
                let invalid = InvalidSetting::new(error.problem, error.hint);
                self.problems.add(SettingOrigin::File(at), entry.path(), invalid);
            }
            None => {
                let invalid = InvalidSetting::new(format!("in the SQL, {error}"), error.hint);
                entry.report(invalid, &mut self.problems);
            }
        }
        None
    }

    fn sql_file(&mut self, entry: &Entry<'_>) -> Option<SqlProgram> {
        let path = PathBuf::from(entry.text(&mut self.problems)?);
        let read = read_sql(&path).and_then(|text| {
            SqlProgram::parse(&text, self.dialect).map_err(|error| {
                let SqlError { line, column, problem, hint } = error;
                InvalidSetting::new(format!("{}:{line}:{column}: {problem}", path.display()), hint)
            })
        });
        self.watched.push(path);
        read.map_err(|invalid| entry.report(invalid, &mut self.problems)).ok()
    }

    fn http(
        &mut self,
        entry: &Entry<'_>,
        section: &Section<'_>,
        spec: &SourceSpec,
        label: &str,
    ) -> Option<HttpTarget> {
        let url = entry.parse(target_url, &mut self.problems);
        let sign_as = match section.get("sign_as") {
            Some(entry) => {
                let sign_as = entry.parse(sign_as, &mut self.problems)?;
                let preset = presets::find(&spec.provider);
                if let (SignAs::Provider, Some(preset)) = (sign_as, preset)
                    && !preset.can_sign()
                {
                    let invalid = InvalidSetting::new(
                        format!("only {} can sign with its private key", preset.title),
                        "write \"standard\", and verify Standard Webhooks in your app",
                    );
                    entry.report(invalid, &mut self.problems);
                    return None;
                }
                sign_as
            }
            None => SignAs::Standard,
        };
        let (secret, signer) = match section.get("secret") {
            Some(entry) => {
                let secret = self.secret(&entry)?;
                let signer = signer(sign_as, &secret, spec)
                    .map_err(|invalid| entry.report(invalid, &mut self.problems))
                    .ok()?;
                (Some(secret), Some(Arc::new(signer)))
            }
            None => (None, None),
        };
        if (sign_as, &secret) == (SignAs::Standard, &None) {
            self.warnings.push(format!(
                "{label}: no `secret`, so requests to your app are not signed, and your app cannot verify that \
                 they come from Hapax"
            ));
        }
        Some(HttpTarget { url: url?, sign_as, secret, signer })
    }

    fn types(&mut self, section: &Section<'_>) -> Option<TypeFilter> {
        let Some(entry) = section.get("types") else { return Some(TypeFilter::default()) };
        TypeFilter::new(entry.texts(&mut self.problems)?)
            .map_err(|error| {
                entry.report(InvalidSetting::new(error.problem, error.hint), &mut self.problems);
            })
            .ok()
    }

    fn retry(&mut self, section: &Section<'_>) -> Option<Vec<Duration>> {
        let Some(entry) = section.get("retry") else { return Some(RETRY_DEFAULT.to_vec()) };
        let waits = entry.list(&mut self.problems)?;
        let invalid = match waits.len() {
            0 => InvalidSetting::new(
                "is empty, so there would be no attempt",
                "write the wait before each attempt: [\"0s\", \"1m\", \"1h\"]; [\"0s\"] is a single attempt",
            ),
            1..=RETRY_MAX => {
                let read = |wait: &Entry<'_>| wait.parse(units::duration, &mut self.problems);
                let read: Vec<_> = waits.iter().filter_map(read).collect();
                return (read.len() == waits.len()).then_some(read);
            }
            many => InvalidSetting::new(
                format!("{many} attempts are more than {RETRY_MAX}"),
                "write fewer, longer waits; dead letters are kept and can be replayed",
            ),
        };
        entry.report(invalid, &mut self.problems);
        None
    }

    /// Reads `timeout` and `lease`. A lease that ends before the timeout would let a second worker claim the
    /// running job.
    fn timeout_and_lease(
        &mut self,
        section: &Section<'_>,
        kind: Option<&HandlerKind>,
        refetch: Option<&Refetch>,
        label: &str,
    ) -> (Duration, Duration) {
        let mut span = |key: &str| {
            let entry = section.get(key)?;
            Some((entry.parse(units::span, &mut self.problems)?, entry))
        };
        let given = (span("timeout"), span("lease"));
        let timeout = match (&given.0, kind) {
            (Some((timeout, _)), _) => *timeout,
            (None, Some(HandlerKind::Sql(_))) => match self.dialect {
                Dialect::Sqlite => SQLITE_TIMEOUT_DEFAULT,
                Dialect::Postgres => TIMEOUT_DEFAULT,
            },
            (
                None,
                Some(HandlerKind::Http(_) | HandlerKind::Pull | HandlerKind::Rust(_)) | None,
            ) => TIMEOUT_DEFAULT,
        };
        // A pull handler without `timeout` is limited by its lease only.
        let timed = given.0.is_some() || !matches!(kind, Some(HandlerKind::Pull) | None);
        let work = if timed { timeout } else { Duration::ZERO };
        let fetch = refetch.map_or(Duration::ZERO, |refetch| refetch.timeout);
        let least = work.saturating_add(fetch).saturating_mul(2);
        let lease = match &given.1 {
            Some((lease, _)) => *lease,
            None => LEASE_DEFAULT.max(least),
        };
        if let Some((_, entry)) = given.1
            && lease < least
        {
            let of = match (timed, refetch.is_some()) {
                (_, false) => format!("the timeout of {timeout:?}"),
                (true, true) => format!("the timeouts of {timeout:?} and, for refetch, {fetch:?}"),
                (false, true) => format!("the timeout of refetch, {fetch:?}"),
            };
            let invalid = InvalidSetting::new(
                format!("is shorter than twice {of}"),
                "lengthen `lease` or shorten `timeout`: when a lease ends, another worker may claim the job",
            );
            entry.report(invalid, &mut self.problems);
        }
        let shares_the_writer =
            matches!((kind, self.dialect), (Some(HandlerKind::Sql(_)), Dialect::Sqlite));
        if shares_the_writer && timeout > SQLITE_TIMEOUT_NOTABLE {
            self.warnings.push(format!(
                "{label}: SQL may take {timeout:?}, and senders get no answer meanwhile, because SQLite has \
                 one writer"
            ));
        }
        (timeout, lease)
    }

    pub(super) fn parsed_number<T>(
        &mut self,
        section: &Section<'_>,
        key: &str,
        read: impl FnOnce(&str) -> Result<T, InvalidSetting>,
    ) -> Option<T> {
        section.get(key)?.parse_number(read, &mut self.problems)
    }

    /// Reports parameters that would always be NULL.
    fn check_parameters_filled(
        &mut self,
        section: &Section<'_>,
        program: &SqlProgram,
        order: Option<&Order>,
        label: &str,
    ) {
        if program.uses(SqlParameter::Resource) && order.is_none() {
            self.warnings.push(format!("{label}: :resource is NULL without [{label}.order]"));
        }
        let way = section.get("sql").or_else(|| section.get("sql_file"));
        if let (true, None, Some(way)) =
            (program.uses(SqlParameter::Current), section.get("refetch"), way)
        {
            let invalid = InvalidSetting::new(
                ":current needs refetch",
                format!("add [{label}.refetch] with the url of the object"),
            );
            way.report(invalid, &mut self.problems);
        }
    }
}

/// The byte offset of an error in the text.
fn byte_of(text: &str, error: &SqlError) -> Option<usize> {
    let line = text.split_inclusive('\n').chain([""]).nth(error.line - 1)?;
    let before: usize = text.split_inclusive('\n').take(error.line - 1).map(str::len).sum();
    let ends = line.char_indices().map(|(at, _)| at).chain([line.len()]);
    Some(before + ends.take(error.column).last()?)
}

fn read_sql(path: &Path) -> Result<String, InvalidSetting> {
    let cannot = |why: String| {
        InvalidSetting::new(
            format!("cannot read {}: {why}", path.display()),
            "write the path of an SQL file, relative to the directory in which hapax is started",
        )
    };
    let about = std::fs::metadata(path).map_err(|error| cannot(error.to_string()))?;
    if !about.is_file() {
        return Err(cannot("not a regular file".to_owned()));
    }
    if about.len() > SQL_FILE_BYTES_MAX {
        return Err(cannot(format!("larger than {SQL_FILE_BYTES_MAX} bytes")));
    }
    std::fs::read_to_string(path).map_err(|error| cannot(error.to_string()))
}

/// Parses the URL of the user's app. Any host is allowed: the operator configures it.
pub(super) fn target_url(text: &str) -> Result<Uri, InvalidSetting> {
    let bad = |what: &str| {
        InvalidSetting::new(what, "write the URL of your app: \"http://127.0.0.1:3000/hooks\"")
    };
    let url: Uri = text.parse().map_err(|_| bad("is not a URL"))?;
    match url.scheme_str() {
        Some("http" | "https") => {}
        Some(_) | None => return Err(bad("must begin with http:// or https://")),
    }
    if url.host().is_none_or(str::is_empty) {
        return Err(bad("names no host"));
    }
    if url.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        return Err(bad("must not contain a user name, because URLs are logged"));
    }
    if text.contains('#') {
        return Err(bad("must not have a fragment, which is never sent"));
    }
    Ok(url)
}

/// Builds the signer of requests to the user's app.
fn signer(sign_as: SignAs, secret: &Secret, source: &SourceSpec) -> Result<Source, InvalidSetting> {
    let secrets = vec![ActiveSecret::forever(secret.clone())];
    let spec = match sign_as {
        SignAs::Standard => {
            if !secret.expose().starts_with("whsec_") {
                return Err(not_standard("it does not begin with whsec_"));
            }
            SourceSpec::new(source.name.as_str(), "standardwebhooks", secrets)
        }
        SignAs::Provider => SourceSpec { secrets, url_known: true, ..source.clone() },
    };
    Source::build(spec).map_err(|error| match sign_as {
        SignAs::Standard => not_standard("the text after whsec_ is not base64"),
        SignAs::Provider => InvalidSetting::new(error.problem, error.hint),
    })
}

fn not_standard(why: &str) -> InvalidSetting {
    InvalidSetting::new(
        format!("is not a Standard Webhooks secret: {why}"),
        "create one with `echo whsec_$(openssl rand -base64 32)`, and configure it in your app too",
    )
}

fn is_sync(text: &str) -> Result<bool, InvalidSetting> {
    match text {
        "async" => Ok(false),
        "sync" => Ok(true),
        other => Err(InvalidSetting::new(
            format!("\"{other}\" is not a mode"),
            "write \"async\" or \"sync\"",
        )),
    }
}

fn sign_as(text: &str) -> Result<SignAs, InvalidSetting> {
    match text {
        "standard" => Ok(SignAs::Standard),
        "provider" => Ok(SignAs::Provider),
        other => Err(InvalidSetting::new(
            format!("\"{other}\" is not a way to sign"),
            "write \"standard\" (Standard Webhooks) or \"provider\" (as the sender does)",
        )),
    }
}

pub(super) fn count(text: &str, most: usize, example: usize) -> Result<usize, InvalidSetting> {
    match text.trim().parse() {
        Ok(count) if (1..=most).contains(&count) => Ok(count),
        Ok(_) | Err(_) => Err(InvalidSetting::new(
            format!("is not a number from 1 to {most}"),
            format!("write a number, such as {example}"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use hapax_core::Timestamp;

    use super::super::reader::{Environment, load_in};
    use super::super::{Config, Flags};
    use hapax_core::order::{Gaps, Machine, OnGap, OrderPolicy, OrderRule};

    use super::*;

    /// A config with one source and `rest` in its section.
    fn load(rest: &str) -> Config {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("hapax.toml");
        let text = format!(
            "[sources.a]\nprovider = \"stripe\"\nsecrets = [\"x\"]\n\
             tenants.acme = {{ secrets = [\"y\"] }}\n{rest}"
        );
        std::fs::write(&file, text).unwrap();
        let environment =
            Environment { env: &|_| None, now: Timestamp::UNIX_EPOCH, read_only: true };
        load_in(&Flags { config: Some(file), ..Flags::default() }, &environment).unwrap()
    }

    fn handler(keys: &str) -> Arc<Handler> {
        Arc::clone(&load(&format!("[sources.a.handlers.h]\n{keys}")).sources[0].handlers[0])
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_handler_has_the_documented_defaults() {
        let sql = handler("sql = 'SELECT :id'");
        assert_eq!((sql.timeout, sql.policy.lease), (SECOND / 10, SECOND * 30));
        assert_eq!((sql.concurrency, sql.order.is_none()), (16, true));
        assert_eq!(sql.policy.retry.last(), Some(&(SECOND * 86_400)));
        assert!(matches!(&sql.kind, HandlerKind::Sql(program) if program.statements.len() == 1));
        assert!(sql.types.matches(None) && sql.types.matches(Some("payout.paid")));
        let http = handler("http = 'http://127.0.0.1:3000/hooks?a=b'");
        assert_eq!((http.timeout, http.policy.lease), (SECOND * 10, SECOND * 30));
        let HandlerKind::Http(target) = &http.kind else { panic!("{http:?}") };
        assert_eq!(target.url.to_string(), "http://127.0.0.1:3000/hooks?a=b");
        assert!(target.sign_as == SignAs::Standard && target.signer.is_none());
        assert!(matches!(handler("pull = true").kind, HandlerKind::Pull));
    }

    #[test]
    fn the_default_lease_grows_with_the_timeout_and_a_pull_handler_may_have_a_short_one() {
        let check = |keys: &str, timeout: Duration, lease: Duration| {
            let handler = handler(keys);
            assert_eq!((handler.timeout, handler.policy.lease), (timeout, lease), "{keys}");
        };
        check("sql = 'SELECT 1'\nlease = '200ms'", SECOND / 10, SECOND / 5);
        check("http = 'http://a/'\ntimeout = '40s'", SECOND * 40, SECOND * 80);
        check("http = 'http://a/'\ntimeout = '1s'\nlease = '2s'", SECOND, SECOND * 2);
        check("http = 'http://a/'\nlease = '20s'", SECOND * 10, SECOND * 20);
        check("pull = true\nlease = '1s'", SECOND * 10, SECOND);
    }

    #[test]
    fn order_is_read_with_its_policy_and_its_gaps() {
        let check = |keys: &str, policy: OrderPolicy, gaps: Gaps| {
            let keys = format!("pull = true\norder = {{ resource = '/r', by = '/b'{keys} }}");
            let handler = handler(&keys);
            let order = handler.order.as_ref().unwrap();
            assert_eq!(order.rule, OrderRule { policy, gaps }, "{keys}");
        };
        let default = Gaps::default();
        let sequence = |start| OrderPolicy::Sequence { start };
        check("", OrderPolicy::Latest, default);
        check(", policy = 'latest'", OrderPolicy::Latest, default);
        check(", policy = 'sequence'", sequence(Some(1)), default);
        check(", policy = 'sequence', start = -5", sequence(Some(-5)), default);
        check(", policy = 'sequence', start = 'first'", sequence(None), default);
        check(
            ", policy = 'sequence', hold = '1s', hold_max = 3, on_gap = 'go'",
            sequence(Some(1)),
            Gaps { hold: SECOND, hold_max: 3, on_gap: OnGap::Go },
        );
        let machine = |start| {
            let allow = ["new -> paid", "paid -> sent"];
            OrderPolicy::Machine(Arc::new(Machine::parse(start, &allow).unwrap()))
        };
        let keys = "policy = 'machine', state = '/s', allow = ['new -> paid', 'paid -> sent']";
        check(&format!(", {keys}"), machine(None), default);
        check(&format!(", start = 'paid', {keys}"), machine(Some("paid")), default);
    }

    #[test]
    fn every_tenant_of_a_source_has_its_handlers_and_its_mode() {
        let config =
            load("mode = 'sync'\nsync_timeout = '2s'\n[sources.a.handlers.h]\nsql = 'SELECT 1'");
        assert_eq!(config.sources.len(), 2);
        for source in &config.sources {
            assert_eq!(
                (source.handlers.len(), source.mode),
                (1, AnswerMode::Sync { timeout: SECOND * 2 })
            );
        }
        let config = load("sync_timeout = '2s'\nmode = 'async'");
        assert_eq!(
            (config.sources[0].handlers.len(), config.sources[0].mode),
            (0, AnswerMode::Async)
        );
        let config = load("mode = 'sync'\n[sources.a.handlers.h]\nhttp = 'http://a/'");
        assert_eq!(config.sources[0].mode, AnswerMode::Sync { timeout: SECOND * 8 });
    }

    #[test]
    fn a_handler_secret_signs_in_the_configured_scheme() {
        let event = load("").sources[0].source.clone();
        let check = |keys: &str, header: Option<&str>| {
            let handler = handler(&format!("http = 'http://a/'\n{keys}"));
            let HandlerKind::Http(target) = &handler.kind else { panic!("{handler:?}") };
            let request = hapax_core::Arrival {
                method: http::Method::POST,
                url: "http://a/".to_owned(),
                headers: http::HeaderMap::new(),
                body: bytes::Bytes::from_static(b"{}"),
            };
            let signed = target.signer(&event).map(|signer| {
                signer
                    .scheme()
                    .sign(&request, Some("evt_1"), Timestamp::UNIX_EPOCH)
                    .unwrap()
                    .headers
            });
            let found =
                signed.iter().flatten().any(|(name, _)| Some(&*name.to_lowercase()) == header);
            assert_eq!((found, signed.is_some()), (header.is_some(), header.is_some()), "{keys}");
        };
        check("", None);
        check("secret = 'whsec_c2VjcmV0'", Some("webhook-signature"));
        check("sign_as = 'standard'\nsecret = 'whsec_c2VjcmV0'", Some("webhook-signature"));
        check("sign_as = 'provider'", Some("stripe-signature"));
        check("sign_as = 'provider'\nsecret = 'anything'", Some("stripe-signature"));
    }

    #[test]
    fn a_file_of_statements_is_watched() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("fee.sql");
        std::fs::write(&file, "-- the fee\nSELECT :id;\n").unwrap();
        let config = load(&format!("[sources.a.handlers.h]\nsql_file = '{}'", file.display()));
        assert!(config.watched_files().contains(&file));
        assert!(config.warnings.is_empty(), "{:?}", config.warnings);
    }
}
