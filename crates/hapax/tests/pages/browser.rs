//! A real browser: chromium, driven by chromedriver over WebDriver, with a profile of its own.
//!
//! The client is written here, because the tests need few of WebDriver's commands. Every wait ends
//! with an event: a mutation of the page, or the next document.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{FOREVER, Lines, Wire, cannot_run, post, until};

/// The name under which WebDriver passes elements.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// How chromium runs: without a window, as any user, and without requests of its own.
const ARGUMENTS: [&str; 9] = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
];

/// Finds a page or a table that does not fit its window, text without contrast, fields without a label, and
/// foreign elements.
const FLAWS: &str = include_str!("flaws.js");

/// Keys as WebDriver names them.
pub(crate) const TAB: &str = "\u{e004}";
pub(crate) const ENTER: &str = "\u{e007}";

/// One browser with one tab. When dropped, the browser ends with its whole process group.
pub(crate) struct Browser {
    driver: Child,
    at: std::net::SocketAddr,
    session: String,
    /// The address of the server whose pages it shows.
    base: String,
    _profile: TempDir,
    /// Entries of the console that the test expects.
    expected: Mutex<Vec<&'static str>>,
}

/// How often chromedriver is started. It takes a free port of IPv6 first, and exits if another program has the same
/// port of IPv4.
const STARTS_MAX: usize = 10;

/// Starts chromedriver. Returns the process and its port, and nothing if it found no port.
fn start_driver(profile: &Path) -> io::Result<Option<(Child, u16)>> {
    let mut driver = Command::new("chromedriver")
        .arg("--port=0")
        // Chromium keeps its own files below these.
        .envs([("HOME", profile), ("TMPDIR", profile)])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()?;
    let output = Lines::of(driver.stdout.take().unwrap());
    let Some(line) = output.try_wait_for("started successfully on port ") else {
        assert!(output.text().contains("port not available"), "{}", output.text());
        driver.wait()?;
        return Ok(None);
    };
    let port = line.trim_end().trim_end_matches('.').rsplit(' ').next().unwrap();
    Ok(Some((driver, port.parse().unwrap())))
}

impl Browser {
    /// Starts a browser for the pages at `base`. Without chromium and its driver the test is skipped, but
    /// not in CI.
    pub(crate) fn start(test: &str, base: &str) -> Option<Self> {
        let profile = tempfile::tempdir().unwrap();
        let started = (0..STARTS_MAX).find_map(|_| start_driver(profile.path()).transpose());
        let (driver, port) = match started.expect("chromedriver finds a port") {
            Ok(started) => started,
            Err(error) => {
                cannot_run(test, &format!("chromedriver cannot be run: {error}"));
                return None;
            }
        };
        let at = std::net::SocketAddr::from(([127, 0, 0, 1], port));
        let mut browser = Self {
            driver,
            at,
            session: String::new(),
            base: base.to_owned(),
            _profile: profile,
            expected: Mutex::default(),
        };
        let data =
            format!("--user-data-dir={}", browser._profile.path().join("chromium").display());
        let mut arguments: Vec<&str> = ARGUMENTS.into_iter().chain([data.as_str()]).collect();
        if base.starts_with("https:") {
            // No authority has signed the certificate of the tests.
            arguments.push("--ignore-certificate-errors");
        }
        let forever = FOREVER.as_millis() as u64;
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome",
            "timeouts": { "script": forever, "pageLoad": forever },
            "goog:chromeOptions": { "args": arguments },
            "goog:loggingPrefs": { "browser": "ALL", "performance": "ALL" },
        }}});
        let session = match browser.ask("POST", "/session", &wanted) {
            Ok(session) => session,
            Err(why) => {
                cannot_run(test, &format!("chromium cannot be run: {why}"));
                return None;
            }
        };
        browser.session = format!("/session/{}", session["sessionId"].as_str().unwrap());
        Some(browser)
    }

    /// Opens a page of the server.
    pub(crate) fn open(&self, path: &str) {
        self.command("/url", &json!({ "url": format!("{}{path}", self.base) }));
    }

    /// The path and the query of the page.
    pub(crate) fn path(&self) -> String {
        let path = self.script("return location.pathname + location.search");
        path.as_str().unwrap().to_owned()
    }

    /// The text of the page as a reader sees it.
    pub(crate) fn text(&self) -> String {
        self.script("return document.body.innerText").as_str().unwrap().to_owned()
    }

    /// Checks that the page shows all of these texts now.
    #[track_caller]
    pub(crate) fn shows(&self, texts: &[&str]) {
        let shown = self.text();
        for text in texts {
            assert!(shown.contains(text), "{} does not show {text:?}: {shown}", self.path());
        }
    }

    /// Checks that the page shows none of these texts.
    #[track_caller]
    pub(crate) fn hides(&self, texts: &[&str]) {
        let shown = self.text();
        for text in texts {
            assert!(!shown.contains(text), "{} shows {text:?}: {shown}", self.path());
        }
    }

    /// Waits until the page shows a text by itself, without being loaded again.
    #[track_caller]
    pub(crate) fn comes_to_show(&self, text: &str) {
        let code = "const [text, done] = arguments;
            const look = () => document.body.innerText.includes(text);
            if (look()) return done(true);
            const observer = new MutationObserver(() => {
              if (look()) { observer.disconnect(); done(true); }
            });
            observer.observe(document.body, { childList: true, subtree: true, characterData: true });";
        let asked = json!({ "script": code, "args": [text] });
        let path = format!("{}/execute/async", self.session);
        let answer = self.ask("POST", &path, &asked);
        assert!(
            answer.is_ok(),
            "{} never shows {text:?}: {answer:?}, {}",
            self.path(),
            self.text()
        );
    }

    /// The value that the script returns.
    #[track_caller]
    pub(crate) fn script(&self, code: &str) -> Value {
        self.command("/execute/sync", &json!({ "script": code, "args": [] }))
    }

    /// Clicks the link or button with this text, and waits for the next page.
    #[track_caller]
    pub(crate) fn follow(&self, text: &str) {
        let path = format!("//*[self::a or self::button][normalize-space()='{text}']");
        let element = self.element("xpath", &path);
        self.to_next_page(|| {
            self.command(&format!("/element/{element}/click"), &json!({}));
        });
    }

    /// Replaces the content of the field that a CSS selector names.
    #[track_caller]
    pub(crate) fn fill(&self, css: &str, text: &str) {
        let element = self.element("css selector", css);
        if self.script(&format!("return document.querySelector('{css}').tagName")) == "INPUT" {
            self.command(&format!("/element/{element}/clear"), &json!({}));
        }
        self.command(&format!("/element/{element}/value"), &json!({ "text": text }));
    }

    /// Presses and releases a key.
    pub(crate) fn press(&self, key: &str) {
        let strokes =
            json!([{ "type": "keyDown", "value": key }, { "type": "keyUp", "value": key }]);
        let asked = json!({ "actions": [{ "type": "key", "id": "keyboard", "actions": strokes }] });
        self.command("/actions", &asked);
    }

    /// Presses Tab until the element with this text has the focus, which must be visible.
    #[track_caller]
    pub(crate) fn tab_to(&self, text: &str) {
        const TABS_MAX: usize = 200;
        let focus = "const e = document.activeElement; const s = getComputedStyle(e);
            return [e.textContent.trim(), s.outlineStyle !== 'none' && s.outlineWidth !== '0px']";
        for _ in 0..TABS_MAX {
            self.press(TAB);
            let found = self.script(focus);
            if found[0] == text {
                assert_eq!(found[1], true, "the focus on {text:?} is not visible");
                return;
            }
        }
        panic!("no Tab reaches {text:?} on {}", self.path());
    }

    /// Waits until the page that `act` leaves is replaced by another one.
    #[track_caller]
    pub(crate) fn to_next_page(&self, act: impl FnOnce()) {
        let before = self.element("css selector", "html");
        act();
        let name = format!("{}/element/{before}/name", self.session);
        until("the next page", || self.ask("GET", &name, &Value::Null).is_err().then_some(()));
        until("the page is complete", || {
            let asked = json!({ "script": "return document.readyState", "args": [] });
            let state = self.ask("POST", &format!("{}/execute/sync", self.session), &asked);
            (state.as_ref() == Ok(&json!("complete"))).then_some(())
        });
    }

    /// Shows pages as a window of this width does, in this colour scheme.
    pub(crate) fn looks(&self, width: u32, scheme: &str) {
        let size =
            json!({ "width": width, "height": 800, "deviceScaleFactor": 1, "mobile": false });
        self.devtools("Emulation.setDeviceMetricsOverride", size);
        let wanted = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.devtools("Emulation.setEmulatedMedia", json!({ "features": wanted }));
    }

    /// Lets scripts of pages run, or not.
    pub(crate) fn allow_scripts(&self, allowed: bool) {
        self.devtools("Emulation.setScriptExecutionDisabled", json!({ "value": !allowed }));
    }

    /// Expects an entry of the console that contains this text, such as the status of a refused request.
    pub(crate) fn expect(&self, entry: &'static str) {
        self.expected.lock().unwrap().push(entry);
    }

    /// Checks the page: page and tables fit the window, text has contrast (WCAG AA), every field has a label,
    /// and no element is one that templates do not write.
    #[track_caller]
    pub(crate) fn is_sound(&self) {
        let flaws = self.script(FLAWS);
        assert_eq!(flaws, json!([]), "{}", self.path());
    }

    /// Checks that since the last check the console has no entry (reports of the content security
    /// policy appear there too), and that every request went to the server.
    #[track_caller]
    pub(crate) fn is_quiet(&self) {
        let entries = self.command("/se/log", &json!({ "type": "browser" }));
        let mut expected = std::mem::take(&mut *self.expected.lock().unwrap());
        for entry in entries.as_array().unwrap() {
            let text = entry["message"].as_str().unwrap();
            let known = expected.iter().position(|expected| text.contains(expected));
            let known = known.unwrap_or_else(|| panic!("the console has an entry: {text}"));
            expected.remove(known);
        }
        assert!(expected.is_empty(), "the console lacks {expected:?}");
        let traffic = self.command("/se/log", &json!({ "type": "performance" }));
        let mut asked = 0;
        for entry in traffic.as_array().unwrap() {
            let event: Value = serde_json::from_str(entry["message"].as_str().unwrap()).unwrap();
            if event["message"]["method"] != "Network.requestWillBeSent" {
                continue;
            }
            let params = &event["message"]["params"];
            // Requests of the page that the browser itself shows first do not count.
            if params["documentURL"].as_str().is_some_and(|url| url.starts_with("chrome://")) {
                continue;
            }
            let url = params["request"]["url"].as_str().unwrap();
            asked += 1;
            assert!(url.starts_with(&self.base), "the page asked for {url}");
        }
        assert!(asked > 0, "no request was recorded");
    }

    /// Writes a screenshot of the page into a file, and returns its path.
    pub(crate) fn screenshot(&self, name: &str) -> Option<std::path::PathBuf> {
        use base64::prelude::{BASE64_STANDARD, Engine as _};
        let image = self.ask("GET", &format!("{}/screenshot", self.session), &Value::Null).ok()?;
        let image = BASE64_STANDARD.decode(image.as_str()?).ok()?;
        let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.png"));
        std::fs::write(&file, image).ok()?;
        Some(file)
    }

    fn devtools(&self, command: &str, params: Value) {
        self.command("/goog/cdp/execute", &json!({ "cmd": command, "params": params }));
    }

    #[track_caller]
    fn element(&self, strategy: &str, value: &str) -> String {
        let found = self.ask(
            "POST",
            &format!("{}/element", self.session),
            &json!({ "using": strategy, "value": value }),
        );
        let found = found
            .unwrap_or_else(|why| panic!("{} has no {value}: {why}: {}", self.path(), self.text()));
        found[ELEMENT].as_str().unwrap().to_owned()
    }

    /// Carries out a command of the session.
    #[track_caller]
    fn command(&self, path: &str, body: &Value) -> Value {
        let answer = self.ask("POST", &format!("{}{path}", self.session), body);
        answer.unwrap_or_else(|why| panic!("{path} {body}: {why}"))
    }

    /// The value that the driver answers, or its error.
    fn ask(&self, method: &str, path: &str, body: &Value) -> Result<Value, String> {
        let request = match body {
            Value::Null => format!("{method} {path} HTTP/1.1\r\nhost: {}\r\n\r\n", self.at).into(),
            body => post(self.at, path, body),
        };
        let mut wire = Wire::try_connect(self.at).map_err(|error| error.to_string())?;
        let answer = wire.try_ask(&request).ok_or("the driver closed the connection")?;
        let mut answer = answer.json();
        match answer["value"]["error"].as_str() {
            Some(_) => Err(answer["value"]["message"].as_str().unwrap_or_default().to_owned()),
            None => Ok(answer["value"].take()),
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.session.is_empty() {
            let name = format!("failed-{}", self.driver.id());
            if let Some(file) = self.screenshot(&name) {
                let _ = std::io::Write::write_fmt(
                    &mut std::io::stderr(),
                    format_args!("what the page looked like: {}\n", file.display()),
                );
            }
        }
        // The group holds the driver, chromium and everything that chromium started.
        let script = format!("kill -s KILL -- -{}", self.driver.id());
        let _ = Command::new("sh").args(["-c", &script]).status();
        let _ = self.driver.wait();
    }
}
