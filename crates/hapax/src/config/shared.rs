//! The URLs of a shared PostgreSQL and Redis, which are never printed with user or password, and the roles
//! of a process.

use std::fmt;

use hapax_core::secret::Secret;

use super::problem::InvalidSetting;
use super::suggest;

/// The URL of a shared service. `Display` prints host and database, without user, password and options.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct ServiceUrl(Secret);

impl ServiceUrl {
    /// `postgres://…` or `postgresql://…`.
    pub(crate) fn postgres(text: &str) -> Result<Self, InvalidSetting> {
        Self::read(text, &["postgres", "postgresql"], "postgres://USER:PASSWORD@HOST:5432/DATABASE")
    }

    /// `redis://…` or, over TLS, `rediss://…`.
    pub(crate) fn redis(text: &str) -> Result<Self, InvalidSetting> {
        Self::read(text, &["redis", "rediss"], "redis://HOST:6379")
    }

    /// The whole URL, for connecting.
    pub(crate) fn expose(&self) -> &str {
        self.0.expose()
    }

    /// Parses a URL. Errors do not quote it: it may contain a password in the wrong place.
    fn read(text: &str, schemes: &[&str; 2], example: &str) -> Result<Self, InvalidSetting> {
        let hint = format!(
            "write \"{example}\"; escape special characters of a password, such as %40 for @"
        );
        let text = text.trim();
        let rest = match text.split_once("://") {
            Some((scheme, rest)) if schemes.contains(&scheme) => rest,
            Some(_) | None => {
                let [one, other] = schemes;
                let problem = format!("must begin with {one}:// or {other}://");
                return Err(InvalidSetting::new(problem, hint));
            }
        };
        if rest.is_empty() {
            return Err(InvalidSetting::new("names no host", hint));
        }
        if rest.chars().any(|c| c.is_whitespace() || c.is_control()) {
            return Err(InvalidSetting::new("contains whitespace", hint));
        }
        let url = Self(Secret::new(text));
        // This also keeps USER:PASSWORD without a host from being printed as HOST:PORT.
        let hosts = url.shown().split('/').next().unwrap_or_default();
        if hosts.split(',').any(|host| !is_host(host)) {
            return Err(InvalidSetting::new("has a port that is not a number", hint));
        }
        Ok(url)
    }

    /// Host and database, or nothing if a part of the password may be in them.
    fn shown(&self) -> &str {
        let rest = self.expose().split_once("://").map_or("", |(_, rest)| rest);
        let end = rest.find(['?', '#']).unwrap_or(rest.len());
        // The last @ counts: a password may contain one, or a slash, unescaped.
        match rest.rfind('@') {
            Some(at) if at < end => &rest[at + 1..end],
            Some(_) => "",
            None => &rest[..end],
        }
    }
}

impl fmt::Display for ServiceUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = self.expose().split("://").next().unwrap_or_default();
        write!(f, "{scheme}://{}", self.shown())
    }
}

impl fmt::Debug for ServiceUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServiceUrl({self})")
    }
}

/// Whether the text after the last colon, outside of brackets, is a port.
fn is_host(host: &str) -> bool {
    let port = match host.rsplit_once(':') {
        Some((_, port)) if !port.ends_with(']') => port,
        Some(_) | None => "",
    };
    port.bytes().all(|digit| digit.is_ascii_digit())
}

/// A role of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Receives webhooks.
    Ingress,
    /// Runs handlers.
    Worker,
    /// Delivers messages to endpoints.
    Sender,
    /// Serves the admin side.
    Admin,
}

impl Role {
    const ALL: [Self; 4] = [Self::Ingress, Self::Worker, Self::Sender, Self::Admin];

    /// The word in the config.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Worker => "worker",
            Self::Sender => "sender",
            Self::Admin => "admin",
        }
    }
}

/// The roles of a process, at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Roles(Vec<Role>);

impl Default for Roles {
    fn default() -> Self {
        Self(Role::ALL.to_vec())
    }
}

impl Roles {
    /// Parses the words, in any order and with repetitions.
    pub(crate) fn parse<'t>(
        words: impl IntoIterator<Item = &'t str>,
    ) -> Result<Self, InvalidSetting> {
        let words: Vec<_> = words.into_iter().map(str::trim).collect();
        let known = Role::ALL.map(Role::as_str);
        if words.is_empty() {
            let hint = format!("write some of {}", known.join(", "));
            return Err(InvalidSetting::new("is empty: the process would do nothing", hint));
        }
        if let Some(unknown) = words.iter().find(|word| !known.contains(word)) {
            let hint = match suggest::nearest(unknown, &known) {
                Some(near) => format!("did you mean \"{near}\"?"),
                None => format!("known: {}", known.join(", ")),
            };
            return Err(InvalidSetting::new(format!("\"{unknown}\" is not a role"), hint));
        }
        Ok(Self(Role::ALL.into_iter().filter(|role| words.contains(&role.as_str())).collect()))
    }

    /// Whether the process has this role.
    pub(crate) fn has(&self, role: Role) -> bool {
        self.0.contains(&role)
    }

    /// The roles that the process does not have.
    pub(crate) fn missing(&self) -> impl Iterator<Item = Role> + '_ {
        Role::ALL.into_iter().filter(|role| !self.has(*role))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_shown_without_anything_that_could_be_a_password() {
        // The password is in its place, unescaped, and in the options.
        for (url, shown) in [
            ("postgres://u:hunter2@h:5432/db", "postgres://h:5432/db"),
            ("postgresql://u:hunter2@h1:1,h2:2/db", "postgresql://h1:1,h2:2/db"),
            ("postgres://u:hun/ter2@x@h/db", "postgres://h/db"),
            ("postgres://u:hunter2?x@h/db", "postgres://"),
            ("postgres://u:hunter2@[::1]:5432/db?sslmode=require", "postgres://[::1]:5432/db"),
            ("postgres://u:hunter2@[::1]", "postgres://[::1]"),
            ("postgres:///db?host=/tmp&password=hunter2", "postgres:///db"),
            ("postgres://h/db?password=x@hunter2", "postgres://"),
        ] {
            let read = ServiceUrl::postgres(url).unwrap();
            assert_eq!(read.to_string(), shown);
            assert_eq!(format!("{read:?}"), format!("ServiceUrl({shown})"));
            assert_eq!(read.expose(), url);
        }
        assert_eq!(ServiceUrl::redis("rediss://:pw@h/0").unwrap().to_string(), "rediss://h/0");
    }

    #[test]
    fn roles_are_read_in_any_order_and_counted_once() {
        let roles = Roles::parse(["worker", " ingress", "worker"]).unwrap();
        assert_eq!(roles, Roles::parse("ingress,worker".split(',')).unwrap());
        assert!(roles.has(Role::Worker) && !roles.has(Role::Admin));
        assert_eq!(roles.missing().collect::<Vec<_>>(), [Role::Sender, Role::Admin]);
        assert_eq!(Roles::default().missing().count(), 0);
    }
}
