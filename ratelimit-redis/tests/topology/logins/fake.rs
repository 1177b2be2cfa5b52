//! Fake servers that refuse a login or seem to accept it, and quote what they received.

use ratelimit_servers::RespValue;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// How a fake server replies.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Manner {
    /// To everything with this text, in which `{}` is all that it has received so far.
    Quotes(&'static str),
    /// To the connection's setup as a real server does, and to everything else with this text.
    QuotesLater(&'static str),
    /// To everything with the same bytes.
    Echoes,
    /// Not at all: it closes the connection at the first command.
    Closes,
    /// Not at all: it is not there.
    Away,
}

pub(crate) const MANNERS: [Manner; 25] = [
    Manner::Quotes("-ERR unknown command '{}', with args beginning with: {}\r\n"),
    Manner::Quotes("-ERR {}\r\n"),
    Manner::Quotes("-{}\r\n"),
    Manner::Quotes("-WRONGPASS invalid username-password pair: {}\r\n"),
    Manner::Quotes("-NOAUTH {}\r\n"),
    Manner::Quotes("-NOPERM User {} has no permissions to run the 'hello' command\r\n"),
    Manner::Quotes("-DENIED {}\r\n"),
    Manner::Quotes("-LOADING {}\r\n"),
    Manner::Quotes("-CLUSTERDOWN {}\r\n"),
    Manner::Quotes("-MASTERDOWN {}\r\n"),
    Manner::Quotes("+{}\r\n"),
    Manner::Quotes("*1\r\n+{}\r\n"),
    Manner::Quotes("%1\r\n+{}\r\n+{}\r\n"),
    Manner::Quotes(">2\r\n+message\r\n+{}\r\n"),
    Manner::Quotes("?{}\r\n"),
    Manner::QuotesLater("-ERR unknown command '{}', with args beginning with: {}\r\n"),
    Manner::QuotesLater("-ERR {}\r\n"),
    Manner::QuotesLater("-{}\r\n"),
    Manner::QuotesLater("-NOPERM User {} has no permissions to run the 'evalsha' command\r\n"),
    Manner::QuotesLater("-CLUSTERDOWN {}\r\n"),
    Manner::QuotesLater("+{}\r\n"),
    Manner::QuotesLater("*2\r\n+{}\r\n:1\r\n"),
    Manner::Echoes,
    Manner::Closes,
    Manner::Away,
];

/// Starts a server and returns its port.
pub(crate) async fn start(manner: Manner) -> u16 {
    if matches!(manner, Manner::Away) {
        return 1;
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, manner));
        }
    });
    port
}

async fn serve(mut stream: TcpStream, manner: Manner) {
    let (mut buffer, mut chunk, mut heard) = (Vec::new(), [0; 4_096], String::new());
    loop {
        let Ok(length @ 1..) = stream.read(&mut chunk).await else { return };
        buffer.extend_from_slice(&chunk[..length]);
        if matches!(manner, Manner::Echoes) {
            if stream.write_all(&chunk[..length]).await.is_err() {
                return;
            }
            continue;
        }
        while let Ok(Some((command, length))) = RespValue::parse(&buffer) {
            buffer.drain(..length);
            let words: Vec<_> = command.as_array().iter().map(ToString::to_string).collect();
            let Some(answer) = answer(manner, &words, &mut heard) else { return };
            if stream.write_all(answer.as_bytes()).await.is_err() {
                return;
            }
        }
    }
}

fn answer(manner: Manner, words: &[String], heard: &mut String) -> Option<String> {
    heard.extend(words.iter().flat_map(|word| [" ", word]));
    let quoted = |said: &str| Some(said.replace("{}", heard.trim()));
    let name = words.first().map_or("", String::as_str).to_uppercase();
    match (manner, &*name) {
        (Manner::QuotesLater(_), "HELLO") => Some("%1\r\n+proto\r\n:3\r\n".into()),
        (Manner::QuotesLater(_), "AUTH" | "SELECT" | "CLIENT") => Some("+OK\r\n".into()),
        (Manner::QuotesLater(_), "PING") => Some("+PONG\r\n".into()),
        (Manner::QuotesLater(_), "INFO") => Some("$0\r\n\r\n".into()),
        (Manner::Quotes(said) | Manner::QuotesLater(said), _) => quoted(said),
        (Manner::Echoes | Manner::Closes | Manner::Away, _) => None,
    }
}
