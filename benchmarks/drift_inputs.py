"""Kinds of input for `benchmarks.drift` that need no download: some like calibration's, most unlike it."""

from __future__ import annotations

import base64
import json
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from calibrate.samples import MODULES, TextTokenizer, heldout_samples

# Everyday sentences, written for this file. A sample is a shuffled run of one language, so sentences come again in it.
SENTENCES: dict[str, str] = {
    "German": """\
Der Zug nach Hamburg fährt heute von einem anderen Gleis ab.|\
Meine Großmutter hat den Garten vor vierzig Jahren angelegt.|Können Sie mir bitte sagen, wie spät es ist?|\
Die Verhandlungen wurden ohne Ergebnis auf den Herbst vertagt.|\
Wer den Schlüssel findet, möge ihn bei der Nachbarin abgeben.|\
Im Winter friert der See so fest zu, dass man darauf gehen kann.|\
Er behauptete, den Vertrag niemals unterschrieben zu haben.|\
Das Wasser muss kochen, bevor die Nudeln hineinkommen.|Trotz des Regens blieben alle bis zum Ende des Konzerts.|\
Ich hätte gern zwei Brötchen und ein halbes Pfund Butter.|Die Brücke ist wegen Bauarbeiten bis März gesperrt.|\
Niemand wusste, woher der Brief gekommen war.|Die Ärztin riet ihm, weniger zu arbeiten und mehr zu schlafen.|\
Auf dem Dachboden fanden sie eine Kiste voller alter Fotografien.|\
Wenn der Wind dreht, hört man die Glocken bis ins Tal.|Das Gesetz tritt am ersten Januar in Kraft.|\
Sie las den Kindern jeden Abend eine Geschichte vor.|Für diese Aufgabe braucht man vor allem Geduld.""",
    "French": """\
Le marché ouvre à sept heures, mais les boulangers arrivent bien avant.|\
Elle n'a jamais voulu quitter la maison de son enfance.|Pourriez-vous répéter la question, s'il vous plaît ?|\
Les pêcheurs ont attendu trois jours que la tempête se calme.|Il reste encore un peu de soupe dans la casserole.|\
Le ministre a refusé de répondre aux journalistes.|\
Au printemps, les cerisiers couvrent la colline de fleurs blanches.|\
Nous avons manqué le dernier métro et sommes rentrés à pied.|\
La bibliothèque sera fermée pendant les travaux d'été.|On raconte que le château est hanté depuis deux siècles.|\
Mon frère répare des horloges anciennes dans son atelier.|Le prix du blé a doublé en moins d'un an.|\
Personne ne s'attendait à une victoire aussi nette.|Il faut laisser reposer la pâte une heure avant de la cuire.|\
Les enfants couraient dans la cour malgré le froid.|Ce roman a été traduit en plus de vingt langues.""",
    "Spanish": """\
La biblioteca del pueblo guarda mapas de hace tres siglos.|Mañana saldremos temprano para evitar el calor.|\
¿Has visto mis gafas encima de la mesa?|El río creció tanto que se llevó el puente viejo.|\
Mi abuelo contaba siempre la misma historia del barco perdido.|\
Los vecinos decidieron pintar la plaza de amarillo.|No hay que abrir el horno antes de los cuarenta minutos.|\
El tribunal aplazó la sentencia hasta después de las fiestas.|Aprendió a tocar la guitarra mirando a los demás.|\
Las gallinas se escaparon por un agujero de la valla.|Cuando llueve, el camino se convierte en barro.|\
Hace años que nadie vive en la casa de la esquina.|El maestro corrigió los exámenes durante el viaje.|\
Prefiero el café sin azúcar y con un poco de leche.|La empresa anunció que cerrará dos de sus fábricas.|\
Desde la torre se ve el mar en los días claros.""",
    "Russian": """\
Поезд опоздал на два часа из-за сильного снега.|Моя сестра работает в больнице на другом берегу реки.|\
Где находится ближайшая аптека?|Старый мост давно пора было починить.|Дети нашли в лесу целую корзину грибов.|\
Он молча закрыл книгу и вышел из комнаты.|Летом в городе почти никого не остаётся.|\
Чай уже остыл, но никто этого не заметил.|Договор подписали после долгих переговоров.|\
На стене висела карта с отмеченными дорогами.|Учитель попросил всех говорить немного тише.|\
Весной вода поднимается до самых ступеней.""",
    "Chinese": """\
明天早上我们坐火车去看望祖父母。|请问最近的地铁站怎么走?|这本书我已经读了三遍，还是很喜欢。|\
下雨的时候，孩子们喜欢在院子里玩水。|会议推迟到下个星期三下午。|她每天晚饭后都会去河边散步。|\
老师让我们把答案写在黑板上。|这座桥是两百年前修建的。|冬天的湖面结了厚厚的冰。|他把钥匙忘在办公室里了。|\
苹果的价格比去年便宜了一些。|没有人知道那封信是谁寄来的。""",
}
WORDS = (
    "the",
    "data",
    "yes",
    "hello world",
    "buffalo",
    "test",
    "no no",
    "a b c",
    "1 2 3",
    "error",
    "very",
    "OK",
)


def _grow(tokenizer: TextTokenizer, tokens: int, piece: Callable[[], str]) -> np.ndarray:
    """Pieces until there are enough tokens."""
    text = ""
    while len(ids := tokenizer.encode(text)) < tokens:
        text += "".join(piece() for _ in range(64))
    return np.asarray(ids[:tokens], np.int32)


def _files(root: str, pattern: str, least: int, without: tuple[str, ...] = ()) -> list[Path]:
    """Those with at least so many characters, in a fixed order."""
    found = sorted(Path(root).glob(pattern))
    return [p for p in found if p.stem not in without and p.stat().st_size >= least]


def _from_file(path: Path, tokenizer: TextTokenizer, tokens: int, rng: random.Random) -> np.ndarray:
    text = path.read_text(encoding="utf-8", errors="replace")
    at = rng.randrange(max(1, len(text) - 8 * tokens))
    start = text.rfind("\n", 0, at) + 1
    ids = tokenizer.encode(text[start:])
    return np.asarray((ids if len(ids) >= tokens else tokenizer.encode(text))[:tokens], np.int32)


def random_tokens(tokenizer: Any, tokens: int, rng: random.Random) -> np.ndarray:
    """Any tokens of the vocabulary, equally likely."""
    return np.asarray([rng.randrange(tokenizer.vocab_size) for _ in range(tokens)], np.int32)


def base64_bytes(tokenizer: TextTokenizer, tokens: int, rng: random.Random) -> np.ndarray:
    """Random bytes as an attachment of a mail."""
    return _grow(tokenizer, tokens, lambda: base64.encodebytes(rng.randbytes(57)).decode())


def repeated_words(tokenizer: TextTokenizer, tokens: int, rng: random.Random) -> np.ndarray:
    """One word or two, over and over."""
    word = rng.choice(WORDS) + " "
    return _grow(tokenizer, tokens, lambda: word)


def other_language(tokenizer: TextTokenizer, tokens: int, rng: random.Random) -> np.ndarray:
    """Sentences of one language that is not English."""
    sentences = SENTENCES[rng.choice(sorted(SENTENCES))].split("|")
    queue: list[str] = []

    def piece() -> str:
        if not queue:
            queue.extend(rng.sample(sentences, len(sentences)))
        return queue.pop() + " "

    return _grow(tokenizer, tokens, piece)


def python_code(tokenizer: TextTokenizer, tokens: int, rng: random.Random) -> np.ndarray:
    """A standard module that is in no sample of calibrate/samples.py."""
    taken = tuple(name for names in MODULES.values() for name in names)
    return _from_file(
        rng.choice(_files(sysconfig.get_path("stdlib"), "*.py", 6 * tokens, taken)), tokenizer, tokens, rng
    )


def c_headers(tokenizer: TextTokenizer, tokens: int, rng: random.Random) -> np.ndarray:
    """A C header of Python."""
    return _from_file(
        rng.choice(_files(sysconfig.get_path("include"), "**/*.h", 6 * tokens)), tokenizer, tokens, rng
    )


def tool_output(tokenizer: TextTokenizer, tokens: int, rng: random.Random) -> np.ndarray:
    """Lines of a log with numbers, paths and JSON, as a program gives them to an agent."""

    def piece() -> str:
        place = f"/srv/app/{rng.choice('abcdef')}{rng.randrange(99)}/worker_{rng.randrange(9)}.log"
        fields = {
            "pid": rng.randrange(99999),
            "ms": round(rng.random() * 900, 3),
            "code": rng.choice((200, 404, 503)),
        }
        stamp = f"2026-11-{rng.randrange(1, 29):02}T{rng.randrange(24):02}:{rng.randrange(60):02}:{rng.random() * 60:06.3f}Z"
        return f"{stamp} {rng.choice(('INFO', 'WARN', 'ERROR'))} {place}:{rng.randrange(4000)} {json.dumps(fields)}\n"

    return _grow(tokenizer, tokens, piece)


KINDS: dict[str, Callable[[Any, int, random.Random], np.ndarray]] = {
    "python code": python_code,
    "C headers": c_headers,
    "tool output": tool_output,
    "other language": other_language,
    "base64": base64_bytes,
    "repeated words": repeated_words,
    "random tokens": random_tokens,
}


def inputs(tokenizer: Any, tokens: int, heldout: int, others: int, seed: int = 0) -> dict[str, np.ndarray]:
    """i32[count, tokens] by kind: held-out texts in calibration's mix first, then `KINDS`."""
    out = {"held-out texts": np.stack([s.tokens for s in heldout_samples(tokenizer, heldout, tokens, seed)])}
    for kind, make in KINDS.items():
        out[kind] = np.stack(
            [make(tokenizer, tokens, random.Random(f"{kind}/{seed}/{i}")) for i in range(others)]
        )
    return out
