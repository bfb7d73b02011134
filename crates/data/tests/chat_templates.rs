//! Chat templates that people have give the texts of transformers' `apply_chat_template`
//! (`oracle/chat_templates.py`), and mark the answers that it marks.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use espalier_data::{ChatTemplate, CivilTime, Conversation, TokenizerConfig};
use serde::Deserialize;

#[derive(Deserialize)]
struct KnownChats {
    conversations: Vec<KnownConversation>,
    templates: BTreeMap<String, KnownTemplate>,
}

#[derive(Deserialize)]
struct KnownConversation {
    messages: minijinja::Value,
    #[serde(default)]
    tools: Option<minijinja::Value>,
}

#[derive(Deserialize)]
struct KnownTemplate {
    template: String,
    special_tokens: BTreeMap<String, String>,
    cases: Vec<KnownChat>,
}

#[derive(Deserialize)]
struct KnownChat {
    conversation: usize,
    add_generation_prompt: bool,
    text: Option<String>,
    /// In characters.
    answers: Vec<[usize; 2]>,
    error: Option<String>,
}

fn known() -> KnownChats {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/oracle/chat_templates.json");
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

fn config(template: &str, special_tokens: &BTreeMap<String, String>) -> TokenizerConfig {
    TokenizerConfig {
        special_tokens: special_tokens.clone(),
        templates: [("default".to_owned(), template.to_owned())].into(),
        add_bos_token: None,
    }
}

#[test]
fn texts_are_those_of_transformers() {
    let (mut rendered, mut raised) = (0, 0);
    let KnownChats { conversations, templates } = known();
    for (name, KnownTemplate { template, special_tokens, cases }) in templates {
        let now = CivilTime::after_epoch(Duration::from_secs(1_721_999_999));
        let template =
            ChatTemplate::new(Path::new("folder"), &config(&template, &special_tokens), Some(now)).unwrap();
        let template = template.unwrap();
        assert_eq!(template.marks_answers(), name == "marked");
        for (number, case) in cases.into_iter().enumerate() {
            let KnownConversation { messages, tools } = &conversations[case.conversation];
            let chat = Conversation::new(messages.clone(), tools.clone()).unwrap();
            let ours = template.render(&chat, case.add_generation_prompt);
            match (case.text, case.error) {
                (Some(text), _) => {
                    let ours = ours.unwrap_or_else(|why| panic!("{name} {number}: {why}"));
                    assert_eq!(ours.text, text, "{name} {number}");
                    let bytes = |at: usize| text.chars().take(at).map(char::len_utf8).sum();
                    let answers: Vec<_> = case.answers.iter().map(|[a, b]| bytes(*a)..bytes(*b)).collect();
                    assert_eq!(ours.answers, answers, "{name} {number}");
                    rendered += 1;
                }
                (None, error) => {
                    let why = ours.unwrap_err().to_string();
                    let error = error.unwrap();
                    assert!(
                        why.ends_with(&error) || error.contains("'"),
                        "{name} {number}: {why}, not {error}"
                    );
                    assert!(
                        why.starts_with("the chat template of folder cannot render") && !why.contains('\n')
                    );
                    raised += 1;
                }
            }
        }
    }
    assert!(rendered > 100 && raised > 10, "{rendered} rendered, {raised} raised");
}

/// Where there is no time, a template that wants one falls back, or is refused with a reason.
#[test]
fn what_is_trained_on_has_no_date() {
    let known = known();
    let KnownTemplate { template, special_tokens, .. } = &known.templates["llama3_2"];
    let chat = Conversation::of_texts([("user", "hi")]);
    let template =
        ChatTemplate::new(Path::new("f"), &config(template, special_tokens), None).unwrap().unwrap();
    assert!(template.render(&chat, false).unwrap().text.contains("Today Date: 26 Jul 2024"));
    let asks = config("{{ strftime_now('%Y') }}", &BTreeMap::new());
    let asks = ChatTemplate::new(Path::new("f"), &asks, None).unwrap().unwrap();
    let why = asks.render(&chat, false).unwrap_err().to_string();
    assert!(
        why.ends_with("it prints today's date, with which the same run would learn other tokens tomorrow"),
        "{why}"
    );
}

#[test]
fn what_is_wrong_is_one_sentence() {
    let broken = config("{% for m in messages %}\n{{ m ", &BTreeMap::new());
    let why = ChatTemplate::new(Path::new("folder"), &broken, None).unwrap_err().to_string();
    assert!(
        why.starts_with("the chat template of folder cannot render a conversation: syntax error"),
        "{why}"
    );
    assert!(!why.contains('\n'));
    let named = TokenizerConfig {
        templates: [("rag".to_owned(), "x".to_owned())].into(),
        ..TokenizerConfig::default()
    };
    let why = ChatTemplate::new(Path::new("folder"), &named, None).unwrap_err().to_string();
    assert!(why.ends_with("none of its templates (rag) is named default"), "{why}");
    let no_role =
        Conversation::new(serde_json::from_str(r#"[{"content": "x"}]"#).unwrap(), None).unwrap_err();
    assert_eq!(no_role, "message 1 of `messages` has no `role`");
}

/// Of the files that models come with: a string, a list of named ones, or a file of its own, which wins.
#[test]
fn templates_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write(
        "tokenizer_config.json",
        r#"{"chat_template": "one", "eos_token": {"content": "</s>"}, "add_bos_token": true}"#,
    );
    let config = TokenizerConfig::of_folder(folder.path()).unwrap();
    assert_eq!((config.templates["default"].as_str(), config.token("eos_token")), ("one", Some("</s>")));
    assert_eq!(config.add_bos_token, Some(true));
    let list =
        r#"{"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}"#;
    write("tokenizer_config.json", list);
    let named = TokenizerConfig::of_folder(folder.path()).unwrap();
    let template = ChatTemplate::new(folder.path(), &named, None).unwrap().unwrap();
    let tools = serde_json::from_str(r#"[{"name": "x"}]"#).unwrap();
    let messages: minijinja::Value = serde_json::from_str(r#"[{"role": "user", "content": "x"}]"#).unwrap();
    let plain = Conversation::new(messages.clone(), None).unwrap();
    let with_tools = Conversation::new(messages, Some(tools)).unwrap();
    let text = |chat| template.render(chat, false).unwrap().text;
    assert_eq!((text(&plain), text(&with_tools)), ("a".into(), "b".into()));
    write("chat_template.jinja", "two");
    assert_eq!(TokenizerConfig::of_folder(folder.path()).unwrap().templates["default"], "two");
    write("tokenizer_config.json", "[]");
    let why = TokenizerConfig::of_folder(folder.path()).unwrap_err().to_string();
    assert!(why.contains("expected a JSON object"), "{why}");
}
