//! Pages in a real browser: scripts run without a complaint, nothing overflows on a phone, and no word is
//! outside its picture.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use espalier_testing::{Need, skipped};

use crate::report::{Served, report, torn};
use crate::study::{ended_study, served};
use crate::{TINY, TestDir, assert_contains, set, succeeded, train_in};

/// A browser on the path.
fn browser() -> Option<PathBuf> {
    let names = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
    let folders: Vec<PathBuf> =
        std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect();
    let found = names.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    let browser = found.into_iter().find(|path| path.is_file());
    if browser.is_none() {
        skipped(Need::Browser, "no Chromium or Chrome is on the path");
    }
    browser
}

/// What a page has become after some seconds of its own time, with all that its scripts complained about.
fn opened(browser: &Path, profile: &Path, address: &str) -> String {
    let flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync";
    let more = "--disable-background-networking --disable-component-update --enable-logging=stderr";
    let output = Command::new(browser)
        .args(flags.split(' '))
        .args(more.split(' '))
        .arg(format!("--user-data-dir={}", profile.display()))
        .args(["--virtual-time-budget=6000", "--dump-dom", address])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    let complaints: Vec<&str> = stderr.lines().filter(|line| line.contains("CONSOLE")).collect();
    assert!(complaints.is_empty(), "{complaints:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Looks at the page from within: how much wider than its window it is, and which words of pictures lie
/// outside of them. Says it to the page around it.
const PROBE: &str = "<script>addEventListener('load', () => {
    const outside = [...document.querySelectorAll('svg text')].filter(text => {
        const box = text.getBBox(), view = text.ownerSVGElement.viewBox.baseVal;
        return box.x < -1 || box.y < -1 || box.x + box.width > view.width + 1 || box.y + box.height > view.height + 1;
    }).map(text => text.textContent);
    const wider = document.documentElement.scrollWidth - document.documentElement.clientWidth;
    const colour = getComputedStyle(document.body).backgroundColor;
    parent.postMessage(`width ${innerWidth} wider ${wider} outside [${outside}] on ${colour}`, '*');
});</script>";

#[test]
fn a_page_is_whole_in_a_browser() {
    let Some(browser) = browser() else { return };
    let at = &TestDir::new();
    let settings =
        set("model.layers=4 prune.method=magnitude prune.sparsity=0.5 train.log_every=1 parallel.pipeline=2");
    for name in ["run", "a-run-with-a-name-that-is-much-too-long-for-any-picture"] {
        let trace = format!("{name}/trace.json");
        succeeded(train_in(at, TINY, &format!("--out {name} --trace {trace} {settings}")));
    }
    let runs = ["run", "a-run-with-a-name-that-is-much-too-long-for-any-picture"];
    for runs in [&runs[..1], &runs] {
        succeeded(report(at, &format!("{} -o page.html", runs.join(" "))).output().unwrap());
        is_whole(&browser, at, "page.html");
    }
}

/// A page in a folder, in windows of a phone's width and of a screen's.
fn is_whole(browser: &Path, at: &Path, page: &str) {
    let page = fs::read_to_string(at.join(page)).unwrap();
    fs::write(at.join("probed.html"), page.replace("</body>", &format!("{PROBE}</body>"))).unwrap();
    for width in [360, 1200] {
        let around = format!(
            "<iframe src='probed.html' width='{width}' height='800' style='border:0'></iframe><p id='found'></p>\
             <script>onmessage = message => {{ found.textContent = message.data; }}</script>"
        );
        fs::write(at.join("around.html"), around).unwrap();
        let address = format!("file://{}", at.join("around.html").display());
        let found = opened(browser, &at.join("profile"), &address);
        assert!(found.contains(&format!("width {width} wider 0 outside []")), "{found}");
    }
}

#[test]
fn a_study_is_whole_in_a_browser_and_alive_while_it_runs() {
    let Some(browser) = browser() else { return };
    let at = &TestDir::new();
    ended_study(at);
    is_whole(&browser, at, "out/tiny/study.html");
    let running = at.join("running");
    fs::create_dir(&running).unwrap();
    let served = served(&running);
    let found = opened(&browser, &at.join("profile"), &format!("http://{}/", served.address));
    assert_contains(&found, &["<div id=\"state\">live</div>", "<h1>Study tiny</h1>"]);
}

#[test]
fn a_live_page_is_alive_in_a_browser() {
    let Some(browser) = browser() else { return };
    let at = &TestDir::new();
    torn(&at.join("one"));
    let served = Served::start(at, "one");
    let found = opened(&browser, &at.join("profile"), &format!("http://{}/", served.address));
    assert!(found.contains("<div id=\"state\">live</div>") && found.contains("<h1>one</h1>"), "{found}");
}
