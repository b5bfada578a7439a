"""Made-up names, goods and dates for the sample documents. No name in a list is part of another one in it."""

from __future__ import annotations

from datetime import date, timedelta
from random import Random

__all__ = [
    "COMPANIES",
    "DISHES",
    "GROCERIES",
    "HARDWARE",
    "PEOPLE",
    "SERVICES",
    "STREETS",
    "TOWNS",
    "a_date",
    "a_phone",
    "an_address",
    "long_date",
]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


TOWNS = _names(
    "Harwick, Ostrell, Brambury, Quillane, Norvale, Tessmoor, Lindock, Ferngate, Ashcombe, Wexhill, Corrin Bay,"
    " Dunmarsh, Elderby, Fallow End, Greywater, Holmsey, Inverlay, Jessop, Kelbrook, Larkfield, Mossley Top,"
    " Nettlebed, Oakrise, Pendry, Ravenport, Saltby, Thornwell, Underhay, Vellane, Windrush, Yarrow, Zelby"
)
STREETS = _names("Mill Lane, Harbour Road, Station Street, Orchard Way, Castle Hill, Weavers Row, Canal Side")
PEOPLE = _names(
    "Marta Ilvesen, Tobin Achterberg, Priya Sandoval, Oskar Lindqvist, Amara Diallo, Jonah Whitlock,"
    " Keiko Marlowe, Dario Fenn, Sunniva Holt, Rafael Brandt"
)
COMPANIES = _names(
    "Northlight Print Works, Calder & Finch Ltd, Blue Heron Logistics, Tidewater Joinery, Stonebridge Optics,"
    " Papermoon Studio, Juniper Field Labs, Halyard Energy"
)
SERVICES = _names(
    "Site survey, Timber delivery, Oak shelving unit, Brass door handle, Window repair, Varnish (5 l tin),"
    " Workshop hours, Glass panel 60 x 90, Poster print A2, Booklet binding, Courier to site, Skip hire,"
    " Paint brush set, Ceiling lamp, Extension cable 10 m, Wall anchor kit, Floor sanding, Safety inspection,"
    " Packing material, Design draft"
)
GROCERIES = _names(
    "Oat drink 1 l, Rye bread, Butter 250 g, Free range eggs, Cherry tomatoes, Bananas, Ground coffee,"
    " Green tea bags, Basmati rice, Spaghetti 500 g, Olive oil, Sea salt, Black pepper, Honey 450 g,"
    " Peanut butter, Strawberry jam, Cheddar block, Natural yoghurt, Salmon fillet, Chicken thighs,"
    " Minced beef, Lentils 1 kg, Chickpeas tin, Plum tomatoes tin, Red onions, Garlic bulb, Carrots 1 kg,"
    " Baby spinach, Broccoli, Sweet potatoes, Lemons 4 pack, Gala apples, Pears, Seedless grapes, Avocado,"
    " Dark chocolate, Oat biscuits, Sparkling water, Orange juice, Ginger ale, Crisps sea salt, Mixed nuts,"
    " Dishwasher tabs, Kitchen roll, Laundry liquid, Hand soap, Toothpaste, Bin liners, Baking paper,"
    " Flour 1 kg, Brown sugar, Dry yeast, Vanilla pods, Mozzarella, Feta cubes, Hummus, Tortilla wraps,"
    " Frozen peas, Vanilla ice cream, Pizza margherita, Soy sauce, Rice vinegar, Dijon mustard, Cornflakes"
)
HARDWARE = tuple(
    f"{part} {size}"
    for part in ("Wood screw", "Hex bolt", "Wall plug", "Copper nail", "Pipe clip", "Steel hook", "Eye bolt")
    for size in ("M4 x 20", "M4 x 35", "M5 x 25", "M5 x 40", "M6 x 30", "M6 x 60", "M8 x 45", "M8 x 80")
)
DISHES = _names(
    "Lentil soup, Onion tart, Beetroot salad, Garlic prawns, Olives, Sourdough & butter, Grilled halloumi,"
    " Smoked trout, Duck rillettes, Mushroom toast, Fish pie, Lamb shank, Rib eye steak, Risotto, Gnocchi,"
    " Seared tuna, Roast chicken, Veggie burger, Moules frites, Pork belly, Aubergine bake, Ravioli,"
    " Truffle chips, Green beans, Slaw, Mashed potato, Side salad, Tomato salad, Creme brulee, Lemon tart,"
    " Cheese board, Apple crumble, Affogato, Sorbet, Chocolate pot, House red, House white, Rose glass,"
    " Pale ale, Stout half, Dry cider, Tonic water, Still water, Elderflower fizz, Espresso, Flat white,"
    " Cappuccino, Mint tea, Hot chocolate, Digestif, Kids pasta, Kids juice, Extra gravy, Aioli, Bread basket"
)
_MONTHS = _names("January, February, March, April, May, June, July, August, September, October, November, December")


def a_date(rng: Random) -> date:
    """A day of 2023 to 2025."""
    return date(2023, 1, 1) + timedelta(days=rng.randrange(1095))


def long_date(day: date) -> str:
    """As in "7 March 2024", in English on every machine."""
    return f"{day.day} {_MONTHS[day.month - 1]} {day.year}"


def a_phone(rng: Random) -> str:
    """A number of the range that is set aside for fiction."""
    return f"555-01{rng.randrange(100):02d}"


def an_address(rng: Random) -> tuple[str, str]:
    """Street with house number, and town with post code."""
    return (
        f"{rng.randint(2, 98)} {rng.choice(STREETS)}",
        f"{rng.choice(TOWNS)} {rng.randrange(10000, 99999)}",
    )
