"""Made-up names, goods and dates for the sample documents. No name in a list is part of another one in it."""

from __future__ import annotations

from datetime import date, timedelta
from random import Random


def _name_list(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


TOWNS = _name_list(
    "Harwick, Ostrell, Brambury, Quillane, Norvale, Tessmoor, Lindock, Ferngate, Ashcombe, Wexhill, Corrin Bay,"
    " Dunmarsh, Elderby, Fallow End, Greywater, Holmsey, Inverlay, Jessop, Kelbrook, Larkfield, Mossley Top,"
    " Nettlebed, Oakrise, Pendry, Ravenport, Saltby, Thornwell, Underhay, Vellane, Windrush, Yarrow, Zelby"
)
STREETS = _name_list("Mill Lane, Harbour Road, Station Street, Orchard Way, Castle Hill, Weavers Row, Canal Side")
PEOPLE = _name_list(
    "Marta Ilvesen, Tobin Achter, Priya Sandoval, Oskar Lindqvist, Amara Diallo, Jonah Whitlock, Keiko Marlowe,"
    " Dario Fenn, Sunniva Holt, Rafael Brandt, Lena Ostrow, Hugo Vance, Ines Calder, Piotr Zeman, Nadia Quill"
)
COMPANIES = _name_list(
    "Northlight Print, Calder & Finch, Blue Heron Ltd, Tidewater Joinery, Stonebridge Optics, Papermoon Studio,"
    " Juniper Labs, Halyard Energy, Kestrel Freight"
)
SHOPS = _name_list(
    "Greengate Market, Corner Pantry, Fennel & Co, Daily Basket, Brackett Tools, Ironside, The Bolt Barn, Cafe Mirabel,"
    " The Copper Pot, Salt & Sorrel, Fern Books, Velo Garage, Studio Nine, Plum Pharmacy, Bakery Okro"
)
GOODS = _name_list(
    "Oat drink, Rye bread, Butter 250 g, Free eggs, Tomatoes, Bananas, Ground coffee, Green tea, Basmati rice,"
    " Spaghetti, Olive oil, Sea salt, Black pepper, Honey 450 g, Peanut butter, Strawberry jam, Cheddar, Yoghurt,"
    " Salmon, Chicken thighs, Minced beef, Lentils 1 kg, Chickpeas, Red onions, Garlic, Carrots, Spinach, Broccoli,"
    " Potatoes, Lemons, Gala apples, Pears, Grapes, Avocado, Dark chocolate, Biscuits, Sparkling water, Orange juice,"
    " Ginger ale, Crisps, Mixed nuts, Kitchen roll, Hand soap, Toothpaste, Bin liners, Baking paper, Flour 1 kg,"
    " Brown sugar, Dry yeast, Vanilla pods, Mozzarella, Feta, Hummus, Tortillas, Frozen peas, Pizza, Soy sauce,"
    " Vinegar, Mustard, Cornflakes, Wood screw M4, Hex bolt M6, Wall plug M8, Copper nail, Pipe clip, Steel hook,"
    " Eye bolt M5, Paint brush, Ceiling lamp, Extension cord, Lentil soup, Onion tart, Beetroot salad, Prawns, Olives,"
    " Halloumi, Smoked trout, Fish pie, Lamb shank, Risotto, Gnocchi, Roast pork, Veggie burger, Ravioli, Green beans,"
    " Creme brulee, Apple crumble, Sorbet, House red, House white, Pale ale, Dry cider, Espresso, Flat white, Mint tea"
)
TASKS = _name_list(
    "Call the plumber, Water the plants, Return the keys, Order new ink, Check the boiler, Sweep the yard,"
    " Pay the rent, Book a table, Charge the bike, Fix the gate, Clean the filter, Post the parcel, Buy stamps,"
    " Feed the cat, Test the alarm, Sort the files, Lock the shed, Mow the lawn, Paint the fence, Oil the hinge,"
    " Pack the tent, Print the form, Renew the pass, Empty the bins, Wash the car, Measure the door"
)
LABELS = _name_list(
    "Depth, Height, Owner, Batch, Model, Serial, Colour, Origin, Grade, Pressure, Voltage, Speed, Fee, Deposit,"
    " Balance, Discount, Delivery, Shipped, Received, Opened, Closed, Author, Editor, Volume, Issue, Chapter,"
    " Shelf, Ward, Bed, Doctor, Driver, Vehicle, Route, Gate, Platform, Coach, Class, Ticket, Account, Branch,"
    " Teller, Signed by, Score, Rank, Team, Coach number, Court, Judge, File, Page, Version, Size, Material,"
    " Length, Width, Area, Rent, Tenant"
)
MONTHS = _name_list("January, February, March, April, May, June, July, August, September, October, November, December")

_HEADS = _name_list(
    "b, bl, br, c, ch, cl, cr, d, dr, f, fl, g, gr, h, j, k, l, m, n, p, pl, pr, qu, r, s, sc, sh, sl, st, t, th, tr,"
    " v, w, y, z"
)
_HEARTS = _name_list("a, e, i, o, u, ai, ea, ee, oa, oo, ou")
_TAILS = _name_list("b, ck, d, ft, g, l, ll, m, n, nd, ng, nt, p, r, rd, rn, s, ss, st, t, x, y")


def a_word(rng: Random) -> str:
    """A word that no language has, such as "Branuck": reading it takes its letters, not a memory of words."""
    syllables = rng.choice((1, 2, 2, 2, 3))
    parts = []
    for last in (*[False] * (syllables - 1), True):
        parts.append(rng.choice(_HEADS) + rng.choice(_HEARTS))
        if last or rng.random() < 0.2:
            parts.append(rng.choice(_TAILS))
    return "".join(parts).capitalize()


def a_name(rng: Random, known: tuple[str, ...], invented: float = 0.0) -> str:
    """One of the ``known`` names or, with probability ``invented``, one or two invented words."""
    if rng.random() >= invented:
        return rng.choice(known)
    return " ".join(a_word(rng) for _ in range(rng.choice((1, 1, 2))))


def a_code(rng: Random) -> str:
    """A reference as offices give them, such as "KD-4821"."""
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.choice((1, 2, 3))))
    digits = "".join(rng.choice("0123456789") for _ in range(rng.choice((3, 4, 5, 6))))
    return f"{letters}{rng.choice(('-', '-', '/', ' ', ''))}{digits}"


def a_date(rng: Random) -> date:
    """A day of 2015 to 2034."""
    return date(2015, 1, 1) + timedelta(days=rng.randrange(7300))


def long_date(day: date) -> str:
    """As in "7 March 2024", in English on every machine."""
    return f"{day.day} {MONTHS[day.month - 1]} {day.year}"


def a_phone(rng: Random) -> str:
    """A number of the range that is set aside for fiction."""
    return f"555-01{rng.randrange(100):02d}"
